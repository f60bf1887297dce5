"""The published algorithm in plain Python, written from the paper as a reference for tests.

arXiv 2408.08696, section 3: the adjacency matrix, the static tree by breadth-first search, the
verification along the tree, and the update by the top-k candidates of every draft token.
"""

from __future__ import annotations


class Oracle:
    """Greedy Token Recycling for one sequence over ``rank``, a function of the context.

    ``rank(context)`` returns the k best next tokens, best first.
    """

    def __init__(self, rank, paths, k):
        self.rank, self.k = rank, k
        self.paths = [tuple(p) for p in paths]  # parents precede their children
        self.matrix = {}

    def draft(self, root):
        """Return path -> token for the paths whose token is known."""
        tree = {(): root}
        for path in self.paths:
            parent = tree.get(path[:-1])
            row = self.matrix.get(parent) if parent is not None else None
            if row is not None:
                tree[path] = row[path[-1]]
        return tree

    def run(self, prompt, n):
        """Yield (draft, emitted tokens) per step; the draft of the first step is None."""
        answers = [(t, self.rank(prompt[: i + 1])) for i, t in enumerate(prompt)]
        # The prompt's candidates fill missing rows; a token's last occurrence wins.
        self.matrix = {token: row[: self.k] for token, row in answers} | self.matrix
        context = [*prompt, self.rank(prompt)[0]]
        yield None, context[-1:]
        while len(context) - len(prompt) < n:
            tree = self.draft(context[-1])
            answer = {}
            for path in tree:
                tokens = [tree[path[:i]] for i in range(1, len(path) + 1)]
                answer[path] = self.rank(context + tokens)
            path, emitted = (), []
            while True:
                best = answer[path][0]
                emitted.append(best)
                following = [p for p in tree if p[:-1] == path and p and tree[p] == best]
                if not following:
                    break
                path = following[0]
            for path in tree:  # in node order: of equal tokens, the last node wins
                self.matrix[tree[path]] = answer[path][: self.k]
            emitted = emitted[: n - (len(context) - len(prompt))]
            context += emitted
            yield tree, emitted
