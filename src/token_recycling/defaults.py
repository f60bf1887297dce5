"""Every default of the library and the command line, stated once."""

CANDIDATES = 8  # k: candidates kept per token (the paper's value)
DRAFTER = "paper"
MAX_NEW_TOKENS = 256
PREFILL_CHUNK = 512  # prompt tokens per forward, over all rows of a batch
CACHE_CHUNK = 256  # slots by which the KV cache grows at least


def tree_for(device_type: str) -> str:
    """Name of the tree for a kind of device.

    Verifying 81 tokens costs little more than one on a data-centre GPU and several times as much
    on a CPU, so the paper's tree is the default only on the former.
    """
    return "paper" if device_type == "cuda" else "small-16"
