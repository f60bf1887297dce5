"""Predictions of a serving engine's speed."""

import numpy as np
import pytest

from simulate_serving import (
    MeasuredSteps,
    RooflineSteps,
    acceptance,
    predict,
)

ACCEPTED = [0.6, 0.4, 0.3, 0.2]


def test_free_nodes_are_all_taken_and_dear_ones_are_not():
    free = predict(lambda requests, nodes: 2.0, ACCEPTED, 4)
    assert (free.nodes, free.plain) == (4, 2.0)
    assert free.tokens_per_second == pytest.approx(2.0 * 2.5)
    assert free.tpot == pytest.approx(4 / free.tokens_per_second)
    dear = predict(lambda requests, nodes: 1.0 + nodes, ACCEPTED, 4)
    assert (dear.nodes, dear.tokens_per_second) == (0, 4.0)
    some = predict(lambda requests, nodes: 1.0 + 0.25 * nodes, ACCEPTED, 1)
    assert some.nodes == max(range(5), key=lambda n: (1 + sum(ACCEPTED[:n])) / (1 + 0.25 * n))
    assert some.nodes not in (0, 4)


def test_the_fit_finds_the_terms_of_a_step():
    rng = np.random.default_rng(0)

    def seconds(requests, nodes):
        return (
            3.0 + 0.1 * requests + (nodes > 0) * (0.5 + 0.05 * requests) + 0.02 * nodes * requests
        )

    costs = [
        (requests, requests * (1 + nodes), 10, seconds(requests, nodes) * rng.normal(1, 0.005))
        for requests in (1, 2, 5, 8)
        for nodes in range(7)
    ]
    steps = MeasuredSteps([{"costs": costs}])
    for requests, nodes in ((4, 0), (4, 3), (16, 0), (16, 6)):
        assert steps(requests, nodes) == pytest.approx(seconds(requests, nodes), rel=0.03)


def test_a_gpu_reads_the_weights_while_it_calculates():
    gpu = RooflineSteps(
        bandwidth=1e12,
        arithmetic=2e14,
        parameters=1e9,
        bytes_per_parameter=2.0,
        cache_bytes=0.0,
        context=1000,
        host=1e-3,
        drafting=0.0,
        drafting_per_request=0.0,
    )
    assert gpu.free_tokens == pytest.approx(200)
    assert gpu(10, 0) == gpu(10, 19) == pytest.approx(3e-3)
    assert gpu(10, 39) == pytest.approx(5e-3)
    assert predict(gpu, ACCEPTED, 8).nodes == 4
    assert predict(gpu, ACCEPTED, 400).nodes == 0


def test_acceptance_is_summed_over_passes():
    passes = [{"drafts": 10, "accepted_at": [6, 4]}, {"drafts": 30, "accepted_at": [14, 6]}]
    assert acceptance(passes) == [0.5, 0.25]
