"""The command line where it was wrong once: streams, interruptions, typing errors, long chats."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from command import ENVIRONMENT
from token_recycling import AdjacencyMatrix, TokenRecycling, TokenRecyclingError, recycler
from token_recycling.bench.prompts import DEMO
from token_recycling.checkpoint import load
from token_recycling.cli import completion, main, progress, show
from token_recycling.cli.conversation import Conversation, going_on
from token_recycling.decoding.metrics import Stats
from token_recycling.drafting import registry
from token_recycling.drafting.templates import shipped
from token_recycling.session import Session

BYTES = b"caf\xe9 \xff\xfe"
PROGRAM = [sys.executable, "-c", "from token_recycling.cli import main; main()"]


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def run(*arguments, **options):
    options = {"capture_output": True, "timeout": 120, "env": ENVIRONMENT} | options
    return subprocess.run([*PROGRAM, *map(str, arguments)], **options)


def typed(monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


@pytest.mark.skipif(os.name != "posix", reason="a shell closes them")
class TestClosedStreams:
    def shell(self, line):
        program = " ".join(f"'{part}'" for part in PROGRAM)
        return subprocess.run(
            ["sh", "-c", line.format(program)],
            capture_output=True,
            timeout=120,
            text=True,
            env=ENVIRONMENT,
        )

    @pytest.mark.parametrize("closed", ["2>&-", pytest.param("<&- 2>&-", marks=pytest.mark.slow)])
    def test_without_stdin_or_stderr_it_answers(self, closed):
        found = self.shell(f"{{}} 'The king' -n 5 --raw {closed}")
        assert found.returncode == 0
        assert found.stdout.strip()
        assert "Traceback" not in found.stderr
        assert "MAT" not in found.stdout  # statistics do not go where the text goes

    @pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
    def test_without_stdout_it_says_so(self, closed):
        found = self.shell(f"{{}} 'The king' -n 5 {closed}")
        assert found.returncode == 2
        assert "Traceback" not in found.stderr
        if "2>" not in closed:
            assert found.stderr == "error: stdout is closed; the output cannot be printed\n"

    @pytest.mark.slow
    def test_chat_without_stdin_ends(self):
        found = self.shell("{} chat -n 5 <&-")
        assert found.returncode == 0
        assert "rror" not in found.stderr
        assert "Traceback" not in found.stderr

    def test_a_reader_that_goes_away(self):
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/m"
            line = f"({{}} 'The king' -n 200 --raw --matrix {file}; echo $? >&2) | head -c 3"
            found = self.shell(line)
            assert AdjacencyMatrix.load(file).rows_seen > 0
        assert found.stderr.endswith("141\n")
        assert "rror" not in found.stderr


class TestBytes:
    """As most people's terminals are set up: strict about UTF-8."""

    STRICT = {**ENVIRONMENT, "PYTHONIOENCODING": "utf-8:strict"}

    def test_a_prompt_that_is_no_text(self):
        found = run("-p", "-", "-n", 5, input=BYTES, env=self.STRICT)
        assert found.returncode == 2
        assert found.stderr.endswith(b"error: the prompt is not valid UTF-8 text\n")
        assert found.stderr.count(b"error") == 1

    @pytest.mark.slow
    def test_a_turn_that_is_no_text(self):
        found = run("chat", "-n", 5, input=BYTES + b"\nThe king\n", env=self.STRICT)
        assert found.returncode == 0
        assert b"not valid UTF-8" in found.stderr
        assert b"Traceback" not in found.stderr
        assert found.stderr.count(b"MAT") == 1


class TestPrintable:
    def test_names_from_files_do_not_steer_the_terminal(self, capsys, tmp_path):
        evil = "\x1b[31mred\x1b]0;title\x07\u202e"
        file = tmp_path / "tree.json"
        about = {"name": evil, "description": evil, "provenance": evil, "paths": [[0]]}
        file.write_text(json.dumps(about))
        for subcommand in ("check", "show"):
            code, out, err = call(capsys, "tree", subcommand, file)
            assert code == 0
            assert "\\x1b[31mred" in out
            assert not set("\x1b\x07\u202e").intersection(out + err)

    def test_nor_do_names_of_files(self, capsys, tmp_path):
        code, out, err = call(capsys, "tree", "check", f"{tmp_path}/\x1b[2Jgone")
        assert code == 2
        assert "\x1b" not in out + err

    def test_nor_a_matrix(self, capsys, tmp_path):
        AdjacencyMatrix(20, 4, fingerprint="\x1b[2J").save(tmp_path / "m")
        _, out, err = call(capsys, "matrix", "show", tmp_path / "m")
        assert "\x1b" not in out + err


class TestMistyped:
    @pytest.mark.parametrize(
        "word, says",
        [
            ("chta", "did you mean chat?"),
            ("Chat", "did you mean chat?"),
            ("generat", "did you mean generate?"),
            ("becnh", "did you mean bench?"),
            ("install", "the commands are bench, chat"),
            ("prompt.txt", "no such command: prompt.txt"),
            ("some/file", "no such command: some/file"),
        ],
    )
    def test_a_word_near_a_verb_is_no_prompt(self, capsys, word, says):
        code, out, err = call(capsys, word, "-n", 5)
        assert code == 2
        assert out == ""
        assert says in err
        assert f"-p {word}" in err
        assert err.count("\n") == 1

    @pytest.mark.parametrize("answer, code", [("y\n", 0), ("n\n", 130), ("\n", 130)])
    def test_on_a_terminal_it_asks(self, capsys, monkeypatch, answer, code):
        typed(monkeypatch, answer)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        found, out, err = call(capsys, "chta", "-n", 3)
        assert found == code
        assert "no such command: chta; did you mean chat? Use it as a prompt? [y/N]" in err
        assert "interrupted" not in err
        assert bool(out.strip()) is (code == 0)

    @pytest.mark.parametrize(
        "arguments",
        [["hi"], ["Hello"], ["Hello!"], ["-p", "chta"], ["Chat with me"], ["Why?"], ["你好"]],
    )
    def test_a_prompt_is_one(self, capsys, arguments):
        code, out, _ = call(capsys, *arguments, "-n", 3)
        assert code == 0
        assert out.strip()


class TestProgress:
    @pytest.mark.parametrize("seconds, said", [(0.3, "loading a model …\n"), (0.0, "")])
    def test_without_a_terminal_a_line_says_what_takes_long(
        self, capsys, monkeypatch, seconds, said
    ):
        monkeypatch.setattr(progress, "PATIENCE", 0.1)
        with progress.busy_shown("loading a model"):
            time.sleep(seconds)
        assert capsys.readouterr().err == said

    def test_a_label_that_changes(self, capsys, monkeypatch):
        monkeypatch.setattr(progress, "PATIENCE", 0.1)
        with progress.busy_shown("loading a model") as relabel:
            relabel("compiling")
            relabel("compiling")
            time.sleep(0.3)
        assert capsys.readouterr().err == "compiling …\n"

    def test_compare_shows_its_rounds(self, capsys, monkeypatch):
        monkeypatch.setattr(progress._Lines, "PAUSE", 0.0)
        code, _, err = call(capsys, "The king", "-n", 4, "--raw", "--compare")
        assert code == 0
        assert re.findall(r"decoding in both ways: (\d of \d)", err) == [
            f"{done} of 8" for done in range(1, 9)
        ]

    @pytest.mark.parametrize("cached", [True, False])
    def test_a_checkpoint_of_the_hub(self, capsys, monkeypatch, tmp_path, cached):
        monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", no_model)
        found = str(tmp_path / "config.json") if cached else None
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *names: found)
        code, _, err = call(capsys, "-p", "Hello", "-m", "some/model")
        assert code == 2
        looks = "there is no folder some/model here; looking for it on the Hugging Face Hub\n"
        hint = "; `token-recycling fetch-model` needs no Hub"
        said = f"error: cannot load the model some/model: no model{'' if cached else hint}\n"
        assert err == ("" if cached else looks) + said

    def test_a_folder_is_not_looked_for(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setattr(recycler, "load_checkpoint", no_model)
        (tmp_path / "config.json").write_text("{}")
        assert call(capsys, "-p", "Hello", "-m", tmp_path)[2] == "error: no model\n"


@pytest.mark.parametrize(
    "options, error",
    [
        (("--drafter", "foo"), "unknown drafter 'foo'; choose from adaptive, paper"),
        (("--dtype", "foo"), "dtype is 'foo'; choose one of auto"),
        (("--device", "foo"), "device foo cannot be used"),
        (("--temp", "-1"), "temperature is -1.0; it must be 0 or more"),
        (("--temp", "1", "--top-p", "2"), "top_p is 2.0; it must be from 0 to 1"),
        (("--matrix", "/"), "--matrix is the folder /; give a file"),
    ],
)
def test_a_wrong_option_is_reported_before_a_model_is_loaded(capsys, monkeypatch, options, error):
    monkeypatch.setattr(recycler, "load_checkpoint", no_model)
    code, _, err = call(capsys, "-p", "Hello", *options)
    assert code == 2
    assert err.startswith(f"error: {error}")
    assert err.count("\n") == 1


def test_options_that_change_nothing_are_named(capsys):
    _, _, err = call(capsys, "-p", "Hello", "-n", "2", "--top-p", "0.5", "--min-p", "0.1")
    assert "--top-p, --min-p: not used without --temp, as nothing is sampled\n" in err
    _, _, err = call(capsys, "-p", "Hello", "-n", "2", "--graph", "--device", "cpu")
    assert "--graph: on cpu nothing is captured\n" in err


def no_model(*arguments, **options):
    raise TokenRecyclingError("no model")


@pytest.mark.parametrize(
    "words, offered",
    [
        ("token-recycling ser", "serve"),
        ("token-recycling serve --qui", "--quiet"),
        ("token-recycling generate --drafter p", "paper\nprompt-lookup"),
        ("token-recycling generate --drafter none", "none"),
        ("token-recycling tree show r", "ranked"),
        ("token-recycling tree check p", "paper"),
        ("token-recycling generate --tree c", "chain-8"),
        ("token-recycling generate --dtype bf", "bfloat16"),
        ("token-recycling fetch-model --dtype q", "q4_1"),
        ("token-recycling bench --decoders generate,au", "generate,auto"),
        ("token-recycling Hello --drafter p", "paper\nprompt-lookup"),
        ("token-recycling -m somewhere --max-t", "--max-tokens"),
    ],
)
def test_shell_completion(words, offered):
    wanted = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    given = {**ENVIRONMENT, "_TOKEN_RECYCLING_COMPLETE": "complete_bash", **wanted}
    done = run(env=given, stdin=subprocess.DEVNULL)
    assert done.stdout.decode().split() == offered.split()


def test_help_names_values_in_one_way(capsys):
    for subcommand in ("generate", "bench", "serve"):
        out = call(capsys, subcommand, "--help")[1]
        assert "[[" not in out
        assert "list[" not in out


class TestOtherPrograms:
    """Decoding that often had no core is mentioned, at most once an hour."""

    @pytest.mark.parametrize(("lost", "said"), [(6.0, True), (1.0, False)])
    def test_a_busy_processor_is_named(self, capsys, lost, said):
        show.reminder.cache_clear()
        stats = Stats(steps=12, seconds={"verify": 10.0}, lost_seconds=lost)
        for first in (True, False):
            show.plainly(stats, None)
            err = capsys.readouterr().err
            assert ("decoding had no processor core for 60% of its time" in err) is (said and first)
        show.reminder.cache_clear()

    def test_more_threads_than_cores_are_refused(self, capsys):
        code, out, err = call(capsys, "-p", "x", "--threads", 5000)
        assert (code, out) == (2, "")
        assert "--threads is 5000; choose 1 to " in err
        assert err.count("\n") == 1


class TestArguments:
    @pytest.mark.parametrize(
        "arguments, says",
        [
            (["--threads", 1, "-n", 3, "chat"], "chat must come before all options"),
            (["bench", "--decoders", ""], "--decoders is ''"),
            (["x y", "-m", "/no/such/folder"], "no such file or folder"),
            (["x y", "-m", ""], "no such file or folder"),
            (["x y", "-n", 0], "it must be 1 or more"),
        ],
    )
    def test_wrong_ones_are_one_line(self, capsys, arguments, says):
        code, out, err = call(capsys, *arguments)
        assert (code, out) == (2, "")
        assert says in err
        assert err.count("\n") == 1


class TestStdin:
    def test_a_byte_order_mark_is_no_text(self, capsys, monkeypatch):
        _, expected, _ = call(capsys, "-p", "The king", "-n", 8, "--raw")
        typed(monkeypatch, "\ufeffThe king")
        assert call(capsys, "-p", "-", "-n", 8, "--raw")[1] == expected

    def test_it_stands_in_front_of_the_prompt(self, capsys, monkeypatch):
        _, expected, _ = call(capsys, "-p", "A fox.\n Summarise this:", "-n", 8, "--raw")
        for arguments in (["Summarise this:"], ["-p", "Summarise this:"]):
            typed(monkeypatch, "A fox.\n")
            assert call(capsys, *arguments, "-n", 8, "--raw")[1] == expected

    @pytest.mark.slow
    def test_files_and_pipes(self, tmp_path, capsys):
        file = tmp_path / "text"
        file.write_text("A fox.\n")
        expected = call(capsys, "-p", "A fox.\n Go on", "-n", 8, "--raw")[1].encode()
        with file.open() as stdin:
            assert run("Go on", "-n", 8, "--raw", stdin=stdin).stdout == expected
        assert run("Go on", "-n", 8, "--raw", input=b"A fox.\n").stdout == expected

    def test_a_bare_pipe_is_a_prompt(self, capsys):
        expected = call(capsys, "-p", "The king", "-n", 256)[1].encode()
        found = run(input=b"The king")
        assert (found.returncode, found.stdout) == (0, expected)

    def test_nothing_on_it(self):
        found = run("generate", input=b" \n")
        assert found.returncode == 2
        assert found.stderr.startswith(b"error: there is no prompt")
        found = run(stdin=subprocess.DEVNULL)
        assert found.returncode == 0
        assert b"Usage" in found.stdout

    def test_an_empty_pipe_beside_a_prompt(self, capsys):
        expected = call(capsys, "-p", "The king", "-n", 8)[1].encode()
        assert run("The king", "-n", 8, input=b"").stdout == expected


@pytest.mark.slow
class Interrupting:
    """Sends this process an interrupt while an answer is written."""

    def __init__(self, monkeypatch, after):

        decode, self.count = Session.decode, 0

        def counted(session, *args, **options):
            for step in decode(session, *args, **options):
                yield step
                self.count += 1
                if self.count == after:
                    raise KeyboardInterrupt

        monkeypatch.setattr(Session, "decode", counted)


class TestInterrupted:
    @pytest.mark.parametrize("arguments", [("demo", "-m", "bundled"), ("check",), ("The king",)])
    def test_one_line_says_so(self, capsys, monkeypatch, arguments):
        """While a model is loaded too."""

        def interrupted(*arguments, **options):
            raise KeyboardInterrupt

        monkeypatch.setattr(recycler, "load_checkpoint", interrupted)
        assert call(capsys, *arguments) == (130, "", "interrupted\n")

    def test_generate_saves_what_was_learnt(self, capsys, monkeypatch, tmp_path):
        file = tmp_path / "m.safetensors"
        Interrupting(monkeypatch, 4)
        code, out, err = call(capsys, "The king", "-n", 200, "--raw", "--matrix", file)
        assert code == 130
        assert out.strip()
        assert "interrupted: the answer is incomplete" in err
        assert AdjacencyMatrix.load(file).rows_seen > 0

    @pytest.mark.skipif(os.name != "posix", reason="sends a signal")
    def test_by_a_real_signal(self, tmp_path):
        file = tmp_path / "m.safetensors"
        arguments = [*PROGRAM, "-p", "The king", "-n", "2000", "--raw", "--matrix", str(file)]
        with subprocess.Popen(
            [*arguments, "--threads", "1"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE, env=ENVIRONMENT,
        ) as process:  # fmt: skip
            process.stdout.read(8)  # it writes
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        if process.returncode == 0:
            pytest.skip("the answer was complete before the signal")
        assert process.returncode == 130
        assert b"interrupted" in err
        assert b"Traceback" not in err
        assert AdjacencyMatrix.load(file).rows_seen > 0

    @pytest.mark.skipif(os.name != "posix", reason="sends a signal")
    @pytest.mark.parametrize("seconds", [0, 0.3, pytest.param(1.5, marks=pytest.mark.slow)])
    def test_before_a_model_is_loaded(self, seconds):
        """Transformers' lazy imports would make another exception of it."""
        code = """if True:
            import os, signal, threading, time
            signal.signal(signal.SIGINT, signal.default_int_handler)

            def tell():  # once an interrupt is handled
                while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    time.sleep(0.001)
                os.write(1, b"handled")

            threading.Thread(target=tell, daemon=True).start()
            from token_recycling.cli import main
            main()
        """
        with subprocess.Popen(
            [sys.executable, "-c", code, "The king"], stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=ENVIRONMENT,
        ) as process:  # fmt: skip
            assert process.stdout.read(7) == b"handled"
            time.sleep(seconds)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (130, b"", b"interrupted\n")

    def test_an_import_cannot_swallow_it(self):
        code = """if True:
            import os, signal, sys
            signal.signal(signal.SIGINT, signal.default_int_handler)
            from token_recycling import cli, recycler

            def swallowing(*arguments, **options):
                try:
                    os.kill(os.getpid(), signal.SIGINT)
                except KeyboardInterrupt as error:
                    raise ModuleNotFoundError("Could not import module") from error

            recycler.load_checkpoint = swallowing
            sys.argv = ["token-recycling", "The king"]
            cli.main()
        """
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT
        )
        assert (done.returncode, done.stdout) == (130, "")
        assert done.stderr.endswith("interrupted\n")
        assert "Traceback" not in done.stderr

    def test_afterwards_it_raises(self):
        code = """if True:
            import os, signal
            from token_recycling.cli import interrupts
            signal.signal(signal.SIGINT, signal.default_int_handler)
            interrupts.end_at_once()
            try:
                with interrupts.raising():
                    os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                print("raised", flush=True)
            os.kill(os.getpid(), signal.SIGINT)
            print("not reached")
        """
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (130, "raised\n", "interrupted\n")

    def test_an_answer_cut_at_its_limit_is_marked(self, capsys):
        _, _, err = call(capsys, "Once upon a time", "-n", 7, "--raw")
        assert "cut after 7 tokens, at the limit of -n\n" in err
        _, _, err = call(capsys, DEMO[0], "-n", 200)
        assert "cut after" not in err

    def test_at_chats_prompt_it_does_not_end_the_chat(self, capsys, monkeypatch):
        lines = iter([KeyboardInterrupt, "The king", KeyboardInterrupt, EOFError])

        def read(prompt):
            line = next(lines)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)
        terminal = type("Terminal", (io.StringIO,), {"isatty": lambda self: True})
        monkeypatch.setattr("sys.stdin", terminal())
        code, _, err = call(capsys, "chat", "-n", 5)
        assert code == 0
        assert err.count("Ctrl-D ends the chat") == 2
        assert err.count("MAT") == 1

    def test_an_answer_in_a_chat_is_cut_and_the_chat_goes_on(self, capsys, monkeypatch):
        Interrupting(monkeypatch, 3)
        typed(monkeypatch, "The king\nGo on.\n")
        code, _, err = call(capsys, "chat", "-n", 40)
        assert code == 0
        assert err.count("interrupted") == 1
        assert err.count("MAT") == 1


class TestChat:
    def test_unknown_commands_do_not_go_to_the_model(self, capsys, monkeypatch):
        typed(monkeypatch, "/help\n/hlep\n/\n")
        code, out, err = call(capsys, "chat", "-n", 5)
        assert (code, out) == (0, "")
        assert err.count("/reset   start a new conversation") == 3
        assert "unknown command: /hlep" in err

    def test_what_only_begins_with_a_slash_is_a_question(self, capsys, monkeypatch):
        typed(monkeypatch, "/usr/bin holds what?\n")
        assert "MAT" in call(capsys, "chat", "-n", 5)[2]

    def test_reset_keeps_what_was_learnt(self, capsys, monkeypatch, tmp_path):
        kept, gone = tmp_path / "kept", tmp_path / "gone"
        typed(monkeypatch, "The king\n/reset\n")
        call(capsys, "chat", "-n", 20, "--matrix", kept)
        assert AdjacencyMatrix.load(kept).rows_seen > 0
        typed(monkeypatch, "The king\n/forget\n")
        call(capsys, "chat", "-n", 20, "--matrix", gone)
        assert AdjacencyMatrix.load(gone).rows_seen == 0

    def test_a_full_context_leaves_out_the_oldest_turns(self, capsys, monkeypatch, bundled):
        room = bundled.target.max_context
        turn = "The old king sat by the fire and told the children a story about a fox. "
        typed(monkeypatch, f"{turn * (room // 60)}\n" * 5)
        code, out, err = call(capsys, "chat", "-n", 20)
        assert code == 0
        assert "turns dropped" in err
        assert "error" not in err
        assert out.count("\n") >= 5

    @pytest.mark.parametrize(
        "arguments", [["-n", 0], ["--seed", -3], ["--stop", ""], ["--system", "word " * 3000]]
    )
    def test_wrong_options_end_it_before_the_first_question(self, capsys, monkeypatch, arguments):
        typed(monkeypatch, "The king\nGo on.\n")
        code, out, err = call(capsys, "chat", *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1

    def test_a_question_that_is_refused_changes_nothing(self, bundled):
        talk = Conversation(bundled.tokenizer)
        for question in ("My name is Bob.", "And yours?"):
            talk.prompt(question)
            talk.answered(question, "Well.", bundled.tokenizer("Well.").input_ids)
        before = talk.prompt("Who am I?")
        assert talk.shorten("word " * 500, 300) == 0
        assert talk.prompt("Who am I?") == before
        assert talk.shorten("Who am I?", len(before) - 1) > 0
        assert len(talk.prompt("Who am I?")) < len(before)

    def test_a_question_that_never_fits_is_an_error_and_the_next_is_answered(
        self, capsys, monkeypatch, bundled
    ):
        typed(monkeypatch, "word " * bundled.target.max_context + "\nThe king\n")
        code, _, err = call(capsys, "chat", "-n", 10)
        assert code == 0
        assert err.count("error: ") == 1
        assert err.count("MAT") == 1


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }}\n"
    "{% else %}ASSISTANT: {{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


class TestSeam:
    """A template that ends in a space: the answer's first token is not what the tokenizer makes."""

    @pytest.fixture
    def tokenizer(self, bundled):
        import copy

        tokenizer = copy.deepcopy(bundled.tokenizer)
        tokenizer.chat_template = TEMPLATE
        return tokenizer

    def test_a_turn_reads_only_what_is_new(self, tokenizer, bundled):

        recycler = TokenRecycling(bundled.model, tokenizer, nodes=8)
        talk, kept, read = Conversation(tokenizer), [], []
        for question in ("Tell me a story.", "And then?", "How does it end?"):
            prompt = talk.prompt(question)
            answer = recycler.generate(prompt, max_new_tokens=60, keep_context=True)
            # it goes on from tokens that are the text
            assert tokenizer.decode(prompt) == tokenizer.decode(
                going_on(tokenizer, tokenizer.decode(prompt), "", [])
            )
            fresh = recycler.generate(prompt, max_new_tokens=60)
            assert fresh.token_ids == answer.token_ids
            kept.append(len(prompt))
            read.append(answer.stats.prompt_tokens)
            recycler.generate(prompt, max_new_tokens=60)
            talk.answered(question, answer.text, answer.token_ids)
        assert read[0] == kept[0]
        new = len(tokenizer("\nUSER: How does it end?\nASSISTANT: ").input_ids)
        assert all(count <= new + 2 for count in read[1:])

    def test_by_tokens_alone_it_would_be_read_again(self, tokenizer, bundled):
        """The control: the seam of this template does move."""
        text = "USER: Say it.\nASSISTANT: "
        ids = going_on(tokenizer, text, "", [])
        answer = tokenizer("Hello there, king", add_special_tokens=False).input_ids
        told = f"{text}Hello there, king\nUSER: Go on.\nASSISTANT: "
        again = going_on(tokenizer, told, "", [])
        assert again[: len(ids) + len(answer)] != ids + answer
        kept = going_on(tokenizer, told, f"{text}Hello there, king", ids + answer)
        assert kept[: len(ids) + len(answer)] == ids + answer
        assert tokenizer.decode(kept) == tokenizer.decode(again)

    def test_a_token_across_the_seam_is_the_tokenizers(self, tokenizer):
        whole = "USER: kingdom"
        found = tokenizer(whole, return_offsets_mapping=True, add_special_tokens=False)
        for cut in range(1, len(whole)):
            across = any(a < cut < b for a, b in found.offset_mapping)
            mine = going_on(tokenizer, whole, whole[:cut], [7, 7])
            assert (mine == found.input_ids) == across


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("what", ["timing steps", "teaching"])
def test_a_bar_names_what_it_counts(what, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress.progress_shown(what) as shown:
        shown(1, 2)
    assert what in terminal.getvalue()
    assert "reading the prompt" not in terminal.getvalue()


def test_what_a_shell_offers_is_what_there_is():
    assert completion._drafters() == registry.names()
    assert set(completion._trees()) == {*shipped(), "chain-8"}
    assert set(completion.DTYPES) == set(load.DTYPES)


@pytest.mark.parametrize("option", ["--show-completion", "--install-completion"])
def test_options_of_completion(tmp_path, option):
    environment = {**ENVIRONMENT, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL": "1"}
    done = run(option, "bash", env=environment)
    assert b"No such option" not in done.stderr


def test_two_numbers_of_a_benchmark_are_told_apart(capsys):
    assert (
        call(capsys, "bench", "--rounds", -1)[2] == "error: --rounds is -1; it must be 1 or more\n"
    )
    assert call(capsys, "bench", "-n", 1)[2] == "error: -n is 1; it must be 2 or more\n"


def test_a_prompt_without_quotes(capsys):
    code, out, err = call(capsys, "Tell", "me", "a", "story")
    assert (code, out) == (2, "")
    assert err.endswith("(me a story); put a prompt of several words in quotes\n")


def test_folders_that_cannot_be_written_to_are_noticed_early(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr(recycler, "load_checkpoint", no_model)
    said = call(capsys, "The king", "--matrix", tmp_path / "m")[2]
    assert said == f"error: the folder of the matrix file cannot be written to: {tmp_path}\n"
    said = call(capsys, "bench", "-o", tmp_path / "a" / "b")[2]
    assert said == f"error: cannot write to {tmp_path}; choose another folder for --out\n"


def test_a_full_disk_behind_stdout(capsys, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("token_recycling.cli.show.stream", full)
    code, _, err = call(capsys, "The king", "-n", 3)
    assert code == 2
    assert err.endswith("error: cannot write the output: No space left on device\n")
