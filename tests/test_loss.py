"""The output matrix and the loss as one function, against transformers' own loss."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

SHAPE = GPT2Config(n_layer=2, n_head=2, n_embd=64, n_positions=64, vocab_size=300, bos_token_id=0, eos_token_id=0,
                   resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)


@pytest.fixture
def pair(gpt2):
    """The same GPT-2 twice, `(transformers' own, with the fused loss)`, and ids (3, 17): 51 tokens, no multiple
    of the chunks."""
    torch.manual_seed(0)
    own = AutoModelForCausalLM.from_config(SHAPE)
    fused = copy.deepcopy(own)
    gpt2.fuse_loss(fused)
    return own, fused, torch.randint(1, 300, (3, 17))


def gradients(model, ids, labels, scale=1.0):
    model.zero_grad()
    loss = model(input_ids=ids, labels=labels).loss
    (loss * scale).backward()
    return loss.detach(), {name: p.grad / scale for name, p in model.named_parameters()}


@pytest.mark.parametrize("ignored", [0, 1, 25, 50])
def test_loss_and_gradients(pair, ignored):
    own, fused, ids = pair
    labels = ids.clone()
    labels.view(-1)[:ignored] = -100
    (own_loss, expected), (loss, found) = (gradients(model, ids, labels) for model in (own, fused))
    assert loss == pytest.approx(own_loss.item(), rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("dtype, scale", [(torch.bfloat16, 1.0), (torch.float16, 2.0**12)])
def test_16_bits_are_no_worse_than_transformers(pair, dtype, scale):
    """The gradient is as near to that of fp32 as transformers' own, to a tenth; the loss scale is that of fp16."""
    own, fused, ids = pair
    _, exact = gradients(own, ids, ids)
    errors = []
    for model in (own, fused):
        _, found = gradients(copy.deepcopy(model).to(dtype), ids, ids, scale)
        errors.append(sum((found[name].float() - exact[name]).square().sum() for name in exact).sqrt().item())
    assert 0 < errors[1] < 1.1 * errors[0]


def test_the_logits_of_all_tokens_never_exist(gpt2, pair):
    """Neither in the loss nor in its gradient is there a tensor larger than a chunk's."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **kwargs or {})
            if isinstance(result, torch.Tensor) and result.shape[-1:] == (300,) and len(result) != 64:  # not weights
                self.rows = max(self.rows, result.numel() // 300)
            return result

    own, fused, ids = pair
    rows = []
    for model in (own, fused):
        with Largest() as largest:
            gradients(model, ids, ids)
        rows.append(largest.rows)
    assert rows[0] >= 48 and 0 < rows[1] <= -(-51 // gpt2.CHUNKS)


def test_nothing_is_prepared_for_a_backward_pass_that_will_not_be(pair):
    own, fused, ids = pair
    with torch.no_grad():
        loss = fused(input_ids=ids, labels=ids).loss
        assert not loss.requires_grad
        assert loss == pytest.approx(own(input_ids=ids, labels=ids).loss.item(), rel=1e-6)
        assert torch.equal(fused(input_ids=ids).logits, own(input_ids=ids).logits)


def test_a_copy_has_its_own_weights_and_generates_the_same(pair):
    own, fused, ids = pair
    copied = copy.deepcopy(fused)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    assert copied(input_ids=ids, labels=ids).loss != fused(input_ids=ids, labels=ids).loss
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(fused.generate(ids, **options), own.generate(ids, **options))
