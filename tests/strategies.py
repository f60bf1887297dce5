"""What hypothesis generates for the tests."""

from hypothesis import strategies as st

from token_recycling import TreeTemplate


@st.composite
def templates(draw):
    """Random trees: every node hangs below one that is there, at a rank not taken."""
    paths = {()}
    for _ in range(draw(st.integers(1, 30))):
        parent = draw(st.sampled_from(sorted(paths)))
        paths.add((*parent, draw(st.integers(0, 4))))
    return TreeTemplate.from_paths("random", [list(p) for p in paths if p])
