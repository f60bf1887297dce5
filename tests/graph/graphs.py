"""What the tests of graphs share."""

from models import random_prompts
from token_recycling import TokenRecycling

PROMPTS = random_prompts([20, 7, 33, 1])
NODES = 15
SAMPLED = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.3, "top_p": 0.8, "top_k": 0},
    "min-p": {"temperature": 1.1, "min_p": 0.1},
}


def recycling(model, **options):
    return TokenRecycling(model, **({"nodes": NODES, "graph": True, "strict": True} | options))


def runners(recycler):
    return list(recycler.session._graph.pool._steps.values())
