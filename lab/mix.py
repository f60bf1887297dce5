"""MAT of the drafter of this checkout on recorded answers: python lab/mix.py RECORDS [halves] [sizes] [starts]."""
import sys
from pathlib import Path
import json
import torch
from fit import drafter, opened
from replay import Run, by_kind, mat, run
PROSE = ("writing", "roleplay", "reasoning", "stem", "humanities", "coding")
model, path = sys.argv[1], Path(sys.argv[2])
half = sys.argv[3] if len(sys.argv) > 3 else "1"
sizes = [int(x) for x in (sys.argv[4] if len(sys.argv) > 4 else "15").split(",")]
starts = (sys.argv[5] if len(sys.argv) > 5 else "cold,hot").split(",")
exact = len(sys.argv) > 6
answers, fit, check = opened(model, path, Path("/work/shared/data"))
torch.set_num_threads(int(__import__("os").environ.get("OMP_NUM_THREADS", "2")))
answers.exact = exact
for start in starts:
    for size in sizes:
        each = Run(drafter(answers), size)
        for one in (fit, check)[int(half)]:
            if start == "cold":
                each.drafter = drafter(answers)
            run(answers, [one], {"": each})
        prose = [r for r in each.results if r.kind in PROSE]
        unk = sum(r.unknown for r in each.results) / sum(r.nodes for r in each.results)
        print(f"{start} {size}: MAT {mat(each.results):.4f} prose {mat(prose):.4f} unknown {unk:.1%}", {k: round(v, 2) for k, v in by_kind(each.results).items()}, flush=True)
        if exact: answers.save()
