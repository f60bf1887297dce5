"""The command line as a user runs it: right answers, and fifteen and more wrong calls."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from token_recycling import BUNDLED_MODEL, AdjacencyMatrix
from token_recycling.cli import main

TREES = Path(__file__).parents[2] / "src/token_recycling/drafting/trees"


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def test_importing_and_help_do_not_import_torch():
    code = (
        "import sys, time; t = time.perf_counter(); import token_recycling;"
        "from token_recycling.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit as e: assert not e.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "print(time.perf_counter() - t)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert float(result.stdout.split()[-1]) < 0.5


def test_a_prompt_alone_is_generate(capsys):
    code, out, err = call(capsys, "How many legs have 3 cats?", "-n", 12)
    assert code == 0
    again = call(capsys, "generate", "-p", "How many legs have 3 cats?", "-n", 12)
    assert again[1] == out != "\n"
    assert "MAT" in err
    assert "tokens/s" in err


def test_json_and_drafters(capsys):
    answers = {}
    for drafter in ("paper", "prompt-lookup", "none"):
        code, out, _ = call(capsys, "The king", "-n", 20, "--raw", "--json", "--drafter", drafter)
        assert code == 0
        answers[drafter] = json.loads(out)
        assert answers[drafter]["drafter"] == drafter
    assert len({a["text"] for a in answers.values()}) == 1
    assert answers["none"]["stats"]["mat"] == 1.0


def test_stdin(capsys, monkeypatch):

    monkeypatch.setattr("sys.stdin", io.StringIO("The king"))
    code, out, _ = call(capsys, "-p", "-", "-n", 8, "--raw")
    assert (code, out) == (0, call(capsys, "The king", "-n", 8, "--raw")[1])


def test_compare_says_identical(capsys):
    code, out, _ = call(
        capsys, "The king", "-n", 30, "--compare", "--json", "--temp", 0.8, "--seed", 4
    )
    result = json.loads(out)
    assert code == 0
    assert result["identical"] is True
    assert result["tokens"] == result["plain_tokens"]
    assert result["speedup"] > 0


def test_the_matrix_file_is_made_and_used(capsys, tmp_path):
    file = tmp_path / "m.safetensors"
    arguments = ("The king", "-n", 30, "--json", "--matrix", file)
    cold = json.loads(call(capsys, *arguments)[1])["stats"]["steps"]
    hot = json.loads(call(capsys, *arguments)[1])["stats"]["steps"]
    assert hot < cold
    code, out, _ = call(capsys, "matrix", "show", file, "--json")
    about = json.loads(out)
    assert code == 0
    matrix = AdjacencyMatrix.load(file)
    slots = about["pairs"] + matrix.triples
    rows = (4096 + slots) * 12 * 6 + slots * 8
    assert rows < about["bytes"] < rows + 40_000
    assert 0 < about["pairs_seen"] <= about["pairs"]
    assert 0 < matrix.triples_seen <= matrix.triples
    assert about["evidence"] > 0
    assert 0 < about["rows_seen"] <= 4096
    _, out, _ = call(capsys, "matrix", "show", file, "--text", "king", "--rows", 2, "--json")
    *_, row = rows = list(json.loads(out)["rows"].values())
    assert len(rows) >= 3
    assert rows[0]["text"] in "king"
    [best, *_] = row["candidates"]
    assert best["id"] == int(matrix.candidates[row["id"], 0])
    assert best["probability"] == float(matrix.probabilities[row["id"], 0])
    _, out, _ = call(capsys, "matrix", "show", file, "--token", row["id"])
    assert f"{json.dumps(best['text'])} ({best['id']}) {best['probability']:.2f}" in out
    unknown = tmp_path / "other.safetensors"
    AdjacencyMatrix(20, 4, fingerprint="20-other").save(unknown)
    assert "7: no row" in call(capsys, "matrix", "show", unknown, "--token", 7)[1]
    for arguments in (["--text", "king"], ["--rows", 1, "-m", BUNDLED_MODEL]):
        code, _, err = call(capsys, "matrix", "show", unknown, *arguments)
        assert (code, "tokenizer" in err) == (2, True)
    merged = tmp_path / "both.safetensors"
    assert call(capsys, "matrix", "merge", file, file, "-o", merged)[0] == 0
    assert AdjacencyMatrix.load(merged).rows_seen == about["rows_seen"]


def test_trees(capsys, tmp_path):
    code, out, _ = call(capsys, "tree", "list", "--json")
    assert code == 0
    assert {row["name"] for row in json.loads(out)} >= {"paper", "ranked"}
    mine = tmp_path / "mine.json"
    mine.write_text("[[0], [1], [0, 0]]")
    assert "3 nodes, levels 2/1" in call(capsys, "tree", "check", mine)[1]
    assert "└─1" in call(capsys, "tree", "show", mine)[1]
    code, out, _ = call(
        capsys, "The king", "-n", 20, "--raw", "--json", "--drafter", "paper", "--tree", mine
    )
    assert json.loads(out)["drafts"] == "tree mine"
    default = call(capsys, "The king", "-n", 20, "--raw", "--json")[1]
    assert json.loads(out)["text"] == json.loads(default)["text"]


def test_chat_keeps_the_conversation(capsys, monkeypatch):

    turns = "How many legs have 3 cats?\n\n/reset\nThe king\nGo on.\n/quit\nnever read\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(turns))
    code, out, err = call(capsys, "chat", "-n", 10)
    assert code == 0
    assert err.count("MAT") == 3
    assert "the conversation is empty" in err
    assert "never read" not in out


def wrong_calls(folder):
    """(arguments, what the line must name) of every kind of wrong call."""
    files = {
        "orphan.json": "[[0], [0, 1, 2]]",
        "twice.json": "[[0], [0]]",
        "empty.json": "[]",
        "broken.json": "{not json",
        "high.json": "[[12]]",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    AdjacencyMatrix(100, 8).save(folder / "small.safetensors")
    AdjacencyMatrix(4096, 4).save(folder / "k4.safetensors")
    whole = (folder / "small.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[:-5])
    (folder / "noise.safetensors").write_bytes(b"noise" * 10)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "nothing-known"}')
    p = "hello there"
    return [
        (["-n", 5], "no prompt"),
        (["-p", ""], "no prompt"),
        ([p, "-p", p], "twice"),
        ([p, "-n", 0], "-n is 0; it must be 1 or more"),
        ([p, "-n", "many"], "--max-tokens"),
        ([p, "--temp", -1], "temperature"),
        ([p, "--temp", 1, "--top-p", 7], "top_p"),
        ([p, "--drafter", "paper", "--tree", "no-such-tree"], "no-such-tree"),
        ([p, "--tree", "paper"], "takes no tree; give a number of nodes"),
        ([p, "--nodes", 0], "nodes is 0; it must be between 1 and 256"),
        ([p, "--drafter", "paper", "--tree", folder / "orphan.json"], "[0, 1, 2]"),
        (["tree", "check", folder / "twice.json"], "[0] appears twice"),
        (["tree", "check", folder / "empty.json"], "no paths"),
        (["tree", "show", folder / "broken.json"], "as JSON"),
        ([p, "--drafter", "paper", "--tree", folder / "high.json"], "uses rank 12"),
        ([p, "--drafter", "paper", "--top-k-candidates", 4], "k=4"),
        ([p, "--top-k-candidates", 0], "k is 0"),
        ([p, "--drafter", "oracle"], "oracle"),
        ([p, "--device", "warp"], "warp"),
        ([p, "--device", "cuda:7"], "cuda:7"),
        ([p, "--dtype", "float99"], "float99"),
        ([p, "--threads", 0], "--threads"),
        ([p, "--device", "meta"], "meta"),
        ([p, "--temp", 1, "--seed", 2**70], "seed"),
        ([p + "\udcff"], "UTF-8"),
        (["tree", "show", "chain-1200"], "1 to 200"),
        (["matrix", "merge", folder / "small.safetensors", folder / "small.safetensors", "-o",
          folder / "cut.safetensors" / "out"], "cannot write"),
        ([p, "-m", folder / "nowhere"], "nowhere"),
        ([p, "-m", folder / "model"], "model"),
        ([p, "--matrix", folder / "small.safetensors"], "100"),
        ([p, "--matrix", folder / "cut.safetensors"], "damaged"),
        ([p, "--matrix", folder / "noise.safetensors"], "damaged"),
        ([p, "--matrix", folder / "no" / "folder.safetensors"], "does not exist"),
        ([p, "--matrix", folder / "k4.safetensors", "--top-k-candidates", 8], "k=4"),
        ([p, "--matrix", folder / "m.safetensors", "--cold"], "choose one"),
        ([p, "--no-such-flag"], "--no-such-flag"),
        (["word " * 3000, "--raw"], "context"),
        (["matrix", "show", folder / "missing.safetensors"], "missing"),
        (["matrix", "show", folder / "small.safetensors", "--token", 100], "100"),
        (
            ["matrix", "merge", folder / "small.safetensors", folder / "k4.safetensors", "-o",
             folder / "out.safetensors"],
            "4096",
        ),
        (["tree"], "command"),
        (["matrix", "teach", folder / "m", "--seconds", 0], "--seconds is 0"),
        (["matrix", "teach", folder / "m", "--tokens", 0], "--tokens is 0"),
        (["matrix", "teach", folder / "m", "--model", folder / "absent"], "absent"),
        (["matrix", "teach", folder / "absent" / "m"], "does not exist"),
    ]  # fmt: skip


def test_the_bundled_model_is_said_to_be_a_toy(capsys):
    code, _, err = call(capsys, "Once upon a time", "-n", 5)
    assert code == 0
    assert err.splitlines()[-1].startswith("the bundled model is a toy of 3.4 M parameters")
    code, _, err = call(capsys, "Once upon a time", "-n", 5, "--model", BUNDLED_MODEL)
    assert (code, "toy" in err) == (0, False)


@pytest.mark.parametrize("index", range(45))
def test_wrong_input_is_one_line_and_exit_code_2(index, capsys, tmp_path):
    calls = wrong_calls(tmp_path)
    assert len(calls) == 45
    arguments, named = calls[index]
    before = sorted(tmp_path.rglob("*"))
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert named in err
    assert "Traceback" not in err
    assert out == ""
    assert sorted(tmp_path.rglob("*")) == before  # nothing half-written
