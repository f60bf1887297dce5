"""The adaptive drafter written as plainly as can be: the oracle of its compiled form.

Rows are dictionaries in dictionaries, trees are grown with ``heapq``, and nothing is cached.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import exp, floor, frexp, log, log1p, log2

LEVELS = ("token", "pair", "triple")
# length of a match: rates of the chain's first token, of later ones, and of other candidates
RUNS = {
    0: (0.01, 0.01, 0.01),
    1: (0.24, 0.60, 0.032),
    2: (0.47, 0.69, 0.022),
    3: (0.60, 0.71, 0.018),
    4: (0.65, 0.78, 0.013),
    5: (0.75, 0.81, 0.010),
    7: (0.80, 0.84, 0.009),
    10: (0.87, 0.87, 0.007),
    16: (0.95, 0.93, 0.004),
}
IN_ROW = {
    "token": (-0.58, 0.63, -0.32),
    "pair": (-0.38, 0.65, -0.40),
    "triple": (-0.14, 0.64, -0.57),
    "runners-up": (-2.81, 0.06, -0.41),
    "rejected": (-1.49, 0.44, -0.30),
}
LACKING = {
    "token": (-3.86, -0.24),
    "pair": (-4.13, -0.35),
    "triple": (-4.28, -0.36),
    "runners-up": (-3.09, -0.03),
    "rejected": (-3.40, -0.04),
}
DEPTHS = (0, 1, 2, 4, 8)
WINDOW, PRIOR, FLOOR = 16, 30.0, 1e-4


def half(p):
    """p rounded to float16."""
    exponent = max(frexp(p)[1] - 1, -14)
    unit = 2.0 ** (exponent - 10)
    return floor(p / unit + 0.5) * unit


def probability_class(p):
    """The log odds of a probability from -9 on, in steps of 1/2."""
    p = min(max(p, 1e-6), 1 - 1e-4)
    return min(max(round(2 * (log(p / (1 - p)) + 9)), 0), 31)


def last_at_most(value, bounds):
    return max(bound for bound in bounds if bound <= value)


def match(text, length):
    """(tokens that followed, length of the longest and then latest earlier n-gram)."""
    for run in range(min(WINDOW, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, run - 1, -1):
            if text[end - run : end] == text[len(text) - run :]:
                return text[end : end + length], run
    return [], 0


@dataclass
class PlainDrafter:
    vocab_size: int
    k: int
    slots: dict  # level: number of slots
    old_weight: float
    learning_rate: float
    chain: int
    max_depth: int
    rows: dict = field(default_factory=dict)  # (level, slot): (key, {candidate: probability})
    hits: dict = field(default_factory=dict)
    trials: dict = field(default_factory=dict)
    weights: dict = field(default_factory=dict)
    root_row: dict = field(default_factory=dict)  # candidates of the next root, best first
    rejected: bool = False  # the root row is made of rejected nodes

    def place(self, level, text):
        """(slot, key) of the last token of ``text`` at a level, or None."""
        if level == "token":
            return text[-1], text[-1]
        n = LEVELS.index(level) + 1
        if len(text) < n or not self.slots[level]:
            return None
        key = 0
        for token in text[-n:]:
            key = key * self.vocab_size + token
        return key % self.slots[level], key

    def row(self, level, text):
        """The row as a dictionary, best first, or None."""
        where = self.place(level, text)
        if where is None:
            return None
        key, row = self.rows.get((level, where[0]), (None, None))
        return row if key == where[1] else None

    def learn_row(self, level, text, new):
        where = self.place(level, text)
        if where is None:
            return
        old = self.row(level, text)
        if old is not None and self.old_weight:
            w = self.old_weight
            mixed = {t: w * p + (1 - w) * new.get(t, 0) for t, p in old.items()}
            mixed |= {t: (1 - w) * p for t, p in new.items() if t not in old}
            new = dict(sorted(mixed.items(), key=lambda pair: -pair[1])[: self.k])
        self.rows[level, where[0]] = where[1], {t: half(p) for t, p in new.items()}

    def rate(self, feature):
        kind = feature[0]
        if kind == "rank":
            _, level, rank, best = feature
            a, b, c = IN_ROW[level]
            expected = 1 / (1 + exp(-(a + b * (best / 2 - 9) + c * log2(1 + rank))))
        elif kind == "absent":
            a, b = LACKING[feature[1]]
            expected = 1 / (1 + exp(-(a + b * (feature[2] / 2 - 9))))
        elif kind == "chain":
            expected = RUNS[feature[1]][1 if feature[2] else 0]
        else:
            expected = RUNS[feature[1]][2]
        trials = self.trials.get(feature, 0)
        return (self.hits.get(feature, 0) + PRIOR * expected) / (trials + PRIOR)

    def logit(self, feature):
        p = min(max(self.rate(feature), 0.0005), 0.995)
        return log(p / (1 - p))

    def weight(self, which, source):
        levels = which[0]
        if source in LEVELS:
            start = 0.0 if source not in levels else 0.7 if source == levels[-1] else 0.3
        else:
            root = 0.3 if len(levels) > 1 else 0.8
            start = {"chain": 0.5, "constant": 0.0, "root": root}[source]
        return self.weights.get((which, source), start)

    def candidates(self, text, below, run, depth, at_root=False):
        """[(candidate, {source: feature}, log odds)] at the end of ``text``, and the weight set."""
        rows = {level: self.row(level, text) for level in LEVELS}
        rows = {level: row for level, row in rows.items() if row is not None}
        order = []
        for level in reversed(rows):
            order += [t for t in rows[level] if t not in order]
        if below is not None and below not in order:
            order.append(below)
        levels = {level: level for level in rows}  # source: level
        if at_root and self.root_row:
            rows["root"] = self.root_row
            levels["root"] = "rejected" if self.rejected else "runners-up"
            order += [t for t in self.root_row if t not in order]
        state = 0 if below is None else 2 if run >= 4 else 1
        which = ("token", *(level for level in rows if level in ("pair", "triple"))), state
        found = []
        for token in order:
            features = {}
            for source, row in rows.items():
                level = levels[source]
                best = next(iter(row.values()))
                if token in row:
                    rank = list(row).index(token)
                    features[source] = "rank", level, rank, probability_class(row[token])
                else:
                    features[source] = "absent", level, probability_class(best)
            if below is not None:
                length = last_at_most(run, RUNS)
                on = token == below
                features["chain"] = ("beside", length)
                if on:
                    features["chain"] = "chain", length, last_at_most(depth, DEPTHS)
            pattern = self.pattern(features)
            odds = self.weight(which, "constant") + self.weights.get((pattern, "constant"), 0)
            for source in (*LEVELS, "chain", "root"):
                if source in features:
                    weight = self.weight(which, source) + self.weights.get((pattern, source), 0)
                    odds += weight * self.logit(features[source])
            found.append((token, features, min(6.0, max(-9.0, odds))))
        return found, which

    @staticmethod
    def pattern(features):
        """The sources that have a candidate."""
        return frozenset(s for s, feature in features.items() if feature[0] in ("rank", "chain"))

    def propose(self, text, nodes):
        """[(token, parent, score)], the root first."""
        chain, run = match(text, self.chain)
        tree = [(text[-1], 0, 1.0)]
        paths, logs, on_chain = [text], [0.0], [0]
        heap, number = [], 0
        node = 0
        while len(tree) < nodes:
            if len(paths[node]) - len(text) < self.max_depth:
                depth = on_chain[node]
                below = chain[depth] if 0 <= depth < len(chain) else None
                found, _ = self.candidates(paths[node], below, run, depth, node == 0)
                for token, _, odds in found:
                    value = logs[node] - log1p(exp(-odds))
                    if value > log(FLOOR):
                        further = depth + 1 if token == below else -1
                        heapq.heappush(heap, (-value, number, token, node, further))
                        number += 1
            if not heap:
                break
            value, _, token, parent, further = heapq.heappop(heap)
            node = len(tree)
            tree.append((token, parent, exp(-value)))
            paths.append([*paths[parent], token])
            logs.append(-value)
            on_chain.append(further)
        return tree

    def observe(self, text, tree, rows, emitted):
        """``rows``: {node: {candidate: probability}}; ``tree``: None if nothing was drafted."""
        if self.learning_rate >= 0 and tree is not None:
            self.count(text, emitted)
        paths = []
        for node, (token, parent, _) in enumerate(tree or [(text[-1], 0, 1.0)]):
            paths.append(text if node == 0 else [*paths[parent], token])
            if node in rows:
                for level in LEVELS:
                    self.learn_row(level, paths[-1], rows[node])
        self.remember(text, paths, rows, emitted)

    def remember(self, text, paths, rows, emitted):
        """Keep what may follow the last emitted token, from the draft's nodes where it was chosen.

        That is after as much of the draft as was right.
        """
        for right in range(len(emitted) - 1, -1, -1):
            before = [*text, *emitted[:right]]
            if before in paths:
                self.root_row, self.rejected = {}, False
                at = paths.index(before)
                if at not in rows:
                    return
                losers = {t: p for t, p in rows[at].items() if t != emitted[right]}
                sources = [
                    row
                    for node, row in sorted(rows.items())
                    if len(paths[node]) == len(before) + 1 and paths[node][:-1] == before
                ][:7]
                self.rejected = bool(sources)
                mixed = {}
                for row in sources:
                    for token, p in row.items():
                        mixed[token] = mixed.get(token, 0) + 0.9 * p / len(sources)
                for token, p in losers.items():
                    share = 0.1 if sources else 1.0
                    mixed[token] = mixed.get(token, 0) + share * p / sum(losers.values())
                best = sorted(mixed.items(), key=lambda pair: -pair[1])[: self.k - 1]
                self.root_row = {t: half(min(p, 1)) for t, p in best}
                return

    def count(self, text, emitted):
        chain, run = match(text, self.chain)
        on_chain = True
        counted = []  # (feature, whether its candidate was right)
        step = {}  # by weight set and source; True: the set of a node
        for depth, truth in enumerate(emitted):
            below = chain[depth] if on_chain and depth < len(chain) else None
            found, which = self.candidates(text, below, run, depth, depth == 0)
            for token, features, odds in found:
                error = (token == truth) - 1 / (1 + exp(-odds))
                for one in ((which, True), (self.pattern(features), False)):
                    for source, feature in features.items():
                        slope = error * self.logit(feature)
                        step[one, source] = step.get((one, source), 0) + slope
                    step[one, "constant"] = step.get((one, "constant"), 0) + error
                counted += [(feature, token == truth) for feature in features.values()]
            on_chain = on_chain and below == truth
            text = [*text, truth]
        rate = self.learning_rate * min(1, 16 / max(len(emitted), 1))
        for ((one, of_node), source), value in step.items():
            old = self.weight(one, source) if of_node else self.weights.get((one, source), 0)
            self.weights[one, source] = old + rate * (1 if of_node else 0.5) * value
        for feature, right in counted:
            self.trials[feature] = self.trials.get(feature, 0) + 1
            self.hits[feature] = self.hits.get(feature, 0) + right
