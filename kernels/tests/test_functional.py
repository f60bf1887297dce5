"""The kernels as functions: what they take, and that they refuse the rest."""

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from skinny_kernels import attend, product, team

pytestmark = pytest.mark.skipif(
    not team.is_available(), reason="there is no team of threads on this machine"
)


def test_products_of_any_layout():
    x, w, bias = torch.randn(3, 32), torch.randn(64, 32), torch.randn(128)
    for weight in (w, torch.randn(32, 64).t(), w[:1].expand(64, 32), w[:, ::2].repeat(1, 2)):
        for added in (None, bias[::2], bias[:1].expand(64)):
            torch.testing.assert_close(product(x, weight, added), linear(x, weight, added))
    assert product(x[:0], w).shape == (0, 64)


@pytest.mark.parametrize(
    "given",
    [
        (torch.ones(3, 32), torch.ones(64, 31)),
        (torch.ones(3, 32), torch.ones(64, 32).bfloat16()),
        (torch.ones(3, 32), torch.ones(64, 32), torch.ones(63)),
        (torch.ones(3, 32).double(), torch.ones(64, 32).double()),
        (torch.ones(3, 32, device="meta"), torch.ones(64, 32)),
    ],
)
def test_products_that_are_refused(given):
    with pytest.raises(ValueError, match="must be"):
        product(*given)


def case(tokens=3, slots=20, size=16, heads=4, groups=2):
    shapes = (heads, tokens), (groups, slots), (groups, slots)
    states = [torch.randn(2, *shape, size) for shape in shapes]
    hidden = torch.ones(tokens, slots, dtype=torch.bool).triu(slots - tokens + 1)
    mask = torch.zeros(2, 1, tokens, slots).masked_fill(hidden, torch.finfo(torch.float32).min)
    return [*states, mask, size**-0.5]


def test_attention():
    query, key, value, mask, scale = case()
    right = scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    torch.testing.assert_close(attend(query, key, value, mask, scale), right.transpose(1, 2))
    turned = query.mT.contiguous().mT
    torch.testing.assert_close(attend(turned, key, value, mask, scale), right.transpose(1, 2))


@pytest.mark.parametrize(
    "options", [{"size": 512}, {"heads": 3}, {"tokens": 129, "slots": 200}, {"tokens": 21}]
)
def test_attention_that_is_refused(options):
    with pytest.raises(ValueError, match="no kernel attends with these"):
        attend(*case(**options))


def test_a_mask_of_another_shape_is_refused():
    query, key, value, mask, scale = case()
    for wrong in (mask[:1], mask[:, :, :1], mask > -1, mask[..., :19]):
        with pytest.raises(ValueError, match="no kernel attends with these"):
            attend(query, key, value, wrong, scale)
