"""What holds for every command: quick help, one sentence for an error, exit codes, completion."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S
from typer.testing import CliRunner

import laconic as lc
from laconic import cli
from laconic.cli._names import NAMES, registered
from laconic.coders import coders

COMMANDS = (
    ("race",),
    ("doctor",),
    ("probe",),
    ("plan",),
    ("lab",),
    ("lab", "run"),
    ("lab", "check"),
    ("bench",),
    ("codecs",),
)
HEAVY = {"torch", "numpy", "numba", "triton", "plotly", "sklearn", "scipy"}
WITHOUT = {name: value for name, value in os.environ.items() if name not in ("RANK", "FORCE_COLOR")}


def invoke(*words: str) -> Any:
    return CliRunner().invoke(cli.app, list(words), env={"COLUMNS": "100"}, prog_name="laconic")


def python(code: str, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        **{"env": WITHOUT, **options},
    )


# Help


@pytest.mark.parametrize("words", [(), *COMMANDS], ids=" ".join)
def test_help_imports_nothing_that_takes_long(words: tuple[str, ...]) -> None:
    code = """
import atexit, sys
from laconic.cli import main
atexit.register(lambda: print("imported", *sorted(sys.modules), file=sys.stderr))
main()
"""
    found = python(code, *words, "--help")
    assert found.returncode == 0 and "Usage: laconic" in found.stdout
    imported = {name.partition(".")[0] for name in found.stderr.split()[1:]}
    assert "typer" in imported and not imported & HEAVY


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_examples(words: tuple[str, ...]) -> None:
    found = invoke(*words, "--help")
    assert found.exit_code == 0
    text = found.stdout.partition("Examples")[2]
    assert text.count(f"laconic {' '.join(words)}") >= 2 or words == ("lab",)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_json(words: tuple[str, ...]) -> None:
    if words != ("lab",):
        assert "--json" in invoke(*words, "--help").stdout


def test_defaults_are_shown() -> None:
    assert "[default: 0.1]" in invoke("plan", "--help").stdout
    assert "[default: 100mbit]" in invoke("lab", "run", "--help").stdout


def test_commands_without_words_are_help() -> None:
    assert invoke().stdout == invoke("--help").stdout and not invoke().exit_code
    assert "check" in invoke("lab").stdout and not invoke("lab").exit_code


def test_the_program_says_its_version() -> None:
    for words in (("-m", "laconic"), ("-c", "from laconic.cli import main; main()")):
        command = [sys.executable, *words, "--version"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert (found.returncode, found.stdout) == (0, f"{lc.__version__}\n")


def test_without_typer_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None\nfrom laconic.cli import main; main()"
    found = python(code, "--help")
    assert found.returncode == 1 and "Traceback" not in found.stderr
    assert found.stderr == "laconic: typer is not installed: pip install 'laconic[cli]'\n"


# Errors


def sentence_of(found: Any) -> str:
    """The one sentence, on stderr, and nothing else anywhere."""
    assert not found.stdout and found.stderr.count("\n") == 1, found.output
    assert found.stderr.startswith("laconic: ")
    return found.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("plam",), "did you mean 'plan'? see laconic --help"),
        (("plan", "--linc", "3"), "--link? see laconic plan --help"),
        (("plan", "--workers", "few"), "invalid value for '--workers'"),
        (("--nonsense",), "no such option: --nonsense; see laconic --help"),
        (("codecs", "dqsg", "qsgd"), "see laconic codecs --help"),
        (("lab", "rum"), "did you mean 'run'?"),
        (("codecs", "ecdk"), "did you mean ecdq?"),
        (("codecs", "dqsg:bitz=3"), "did you mean bits?"),
        (("bench", "--dtype", "int4"), "dtype is one of fp32"),
        (("bench", "--device", "tpu"), "device is cpu or cuda"),
        (("bench", "--codecs", "qsgd,zip"), "no codec is called 'zip'"),
        (("bench", "--values", "many"), "a number is like 125m"),
        (("bench", "--seconds", "0"), "seconds are above 0"),
        (("bench", "--threads", "0"), "threads are 1 or more"),
        (("bench", "--values", "90000b"), "values do not fit into memory"),
        (("bench", "--values", "9999999999t"), "values do not fit into memory"),
    ],
)
def test_a_usage_error_is_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    found = invoke(*words)
    assert found.exit_code == 2 and sentence in sentence_of(found)


class OddError(RuntimeError):
    pass


def fails_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*words: object) -> None:
        raise error

    for name in ("listed", "explained"):
        monkeypatch.setattr(f"laconic.cli._codecs.{name}", fail)


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (lc.ConfigError("bits are\nfew"), 2, "bits are few"),
        (lc.LostError("rank 3 is gone"), 1, "rank 3 is gone"),
        (FileNotFoundError(2, "No such file", "probe.json"), 1, "No such file: probe.json"),
        (ModuleNotFoundError("no module", name="plotly"), 1, "pip install plotly"),
        (
            OddError("odd"),
            1,
            "OddError: odd; unexpected error, probably a bug in laconic: run it again",
        ),
        (OddError(), 1, "laconic: OddError; unexpected"),
        (KeyboardInterrupt(), 130, "laconic: interrupted"),
        (EOFError(), 130, "laconic: interrupted"),
    ],
)
def test_errors_end_in_a_sentence(
    error: BaseException, status: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_with(error, monkeypatch)
    found = invoke("codecs")
    assert found.exit_code == status and sentence in found.stderr
    assert found.stderr.strip().count("\n") == 0 and not found.stdout


def test_debug_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(OddError("odd"), monkeypatch)
    assert isinstance(invoke("--debug", "codecs").exception, OddError)
    assert isinstance(invoke("codecs", "--debug").exception, SystemExit)  # no option of codecs
    assert invoke("codecs", "--", "--debug").exit_code == 1  # a word of somebody else's
    assert invoke("--debug", "plam").exit_code == 2


def test_ctrl_c_is_one_line() -> None:
    code = """
import sys, time
from laconic.cli import _codecs, main
def wait(*words):
    print("up", flush=True)
    time.sleep(600)
_codecs.listed = wait
sys.argv[1:] = ["codecs"]
main()
"""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, complaint) == (130, "laconic: interrupted\n")


# Completion


def completed(*words: str) -> list[str]:
    """What bash would be offered, without waiting for torch."""
    code = """
import atexit, sys
from laconic.cli import main
atexit.register(lambda: print("torch" in sys.modules, file=sys.stderr))
main()
"""
    line = " ".join(("laconic", *words))
    asked = {"_LACONIC_COMPLETE": "complete_bash", "COMP_WORDS": line}
    found = python(code, env={**WITHOUT, **asked, "COMP_CWORD": str(len(words))})
    assert found.stderr == "False\n", found.stderr
    return found.stdout.split()


def test_words_are_completed() -> None:
    assert completed("pl") == ["plan"]
    assert completed("bench", "--codecs", "dqsg,ec") == ["dqsg,ecdq"]
    assert completed("probe", "--codecs", "rot") == ["rotate("]
    assert completed("plan", "--machine", "g6") == ["g6.12xlarge"]
    assert completed("plan", "--device", "rtx4") == ["rtx4090"]
    assert completed("race", "--strategies", "fp32,ss") == ["fp32,ssd+ecdq"]
    assert completed("codecs", "scatter") == ["scatter-reduce"]


def test_completion_can_be_installed() -> None:
    # else typer asks which shell this runs in, and under make that is sh
    told = {**WITHOUT, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    found = python("from laconic.cli import main; main()", "--show-completion", "bash", env=told)
    assert found.returncode == 0 and "_LACONIC_COMPLETE=complete_bash" in found.stdout


def test_the_file_of_names_is_up_to_date() -> None:
    assert registered() == NAMES, "write it: python -m laconic.cli._names"


# Codecs


def told(*words: str) -> Any:
    found = invoke(*words, "--json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_all_codecs_are_listed() -> None:
    found, shown = told("codecs"), invoke("codecs").stdout
    assert [one["name"] for one in found["codecs"]] == lc.codecs()
    assert [one["name"] for one in found["wrappers"]] == [f"{name}(...)" for name in lc.wrappers()]
    assert [one["name"] for one in found["coders"]] == coders()
    assert [one["name"] for one in found["exchanges"]] == lc.exchanges()
    assert [one["name"] for one in found["schedules"]] == ["ssd", "local", "async", "qsvrg"]
    for kind in found.values():
        for one in kind:
            assert one["name"] in shown and one["does"]
    by_name = {one["name"]: one for one in found["codecs"] + found["wrappers"]}
    for name in lc.codecs():
        assert by_name[name]["unbiased"] == ("yes" if lc.codec(name).unbiased else "no")
    assert by_name["global"]["summable"] == "yes" and by_name["qsgd"]["summable"] == "no"
    assert by_name["rotate(...)"]["unbiased"] == "as inside"
    assert by_name["feedback(...)"]["unbiased"] == "no"
    assert by_name["dqsg"]["bits"] == pytest.approx(4 + 32 / 512)
    assert by_name["ecdq"]["bits"] is None


@pytest.mark.parametrize("name", [*lc.codecs(), *lc.wrappers(), *coders(), *lc.exchanges()])
def test_one_is_explained(name: str) -> None:
    one, shown = told("codecs", name), invoke("codecs", name).stdout
    assert one["does"] in shown.replace("\n", " ").replace("  ", " ") and one["example"] in shown
    text = re.search(r'"(.*)"', one["example"])
    assert text is not None
    lc.pair(text[1])  # what the example says works
    for setting in one["settings"]:
        assert setting["name"] in shown
        assert setting["allowed"], setting  # and says what is allowed


@pytest.mark.parametrize("name", ["ssd", "local", "async"])
def test_a_schedule_is_explained(name: str) -> None:
    example = told("codecs", name)["example"]
    call = ast.parse(example.partition("= ")[2], mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    known = inspect.signature(getattr(lc, call.func.attr)).parameters
    assert all(word.arg in known for word in call.keywords)


def test_a_codecs_own_settings_are_shown() -> None:
    one = told("codecs", "qsgd:bits=2,norm=l2")
    settings = {setting["name"]: setting for setting in one["settings"]}
    assert (
        settings["bits"]["value"] == "2" and settings["bits"]["allowed"] == "an integer from 2 to 8"
    )
    assert settings["norm"]["allowed"] == "one of max, l2"
    assert one["example"] == 'lc.compress(model, "qsgd:bits=2,norm=l2")'
    assert told("codecs", "rotate(qsgd-topk)")["unbiased"] == "no"


def test_the_page_of_wires_names_all_codecs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
    inside = [lc.codec(f"{name}(dqsg)") for name in lc.wrappers()]
    for one in [*map(lc.codec, lc.codecs()), *inside]:
        assert re.search(rf"\b{one.id} {one.name}[ ,]", page), one


# Bench


def test_codecs_are_measured_beside_a_copy() -> None:
    words = "--values", "4k", "--seconds", "0.05", "--threads", "1", "--device", "cpu"
    (found,) = told("bench", *words, "--codecs", "dqsg:bits=4,ecdq:error=0.08,coder=rans,ndqsg")
    assert (found["device"], found["threads"], found["values"]) == ("cpu", 1, 4000)
    assert found["copy"]["copies"] == 1 and found["rounds"] >= 5 and not found["skipped"]
    names = [row["codec"] for row in found["rows"]]
    assert names == ["dqsg:bits=4", "ecdq:error=0.08,coder=rans", "ndqsg"]
    for row in found["rows"]:
        for way in ("encode", "decode"):
            one = row[way]
            assert 0 < one["p10_s"] <= one["median_s"] <= one["p90_s"]
            assert one["copies"] == pytest.approx(one["median_s"] / found["copy"]["median_s"])
            assert one["gb_s"] == pytest.approx(16e-6 / one["median_s"])
    assert 4 < found["rows"][0]["bits"] < 4.3 and 0.01 < found["rows"][0]["error"] < 0.03
    shown = invoke("bench", *words, "--codecs", "fp16", "--dtype", "bf16").stdout
    assert (
        "fp16" in shown and "x copy" in shown and "4,000 bf16 values" in shown and "…" not in shown
    )


def test_percentiles_lie_within_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(work: Any, *words: object) -> dict[Any, list[float]]:
        return {name: [5.0, 1.0, 4.0, 2.0, 3.0] for name in work}

    monkeypatch.setattr("laconic.bench._bench._in_turns", measured)
    (found,) = told("bench", "--values", "1k", "--device", "cpu", "--codecs", "fp16")
    one = found["rows"][0]["encode"]
    assert (one["p10_s"], one["median_s"], one["p90_s"]) == pytest.approx((1.4, 3.0, 4.6))


def test_threads_stay_as_they_were() -> None:
    import torch

    before = torch.get_num_threads()
    invoke("bench", "--values", "100", "--seconds", "0.01", "--threads", "2", "--codecs", "fp16")
    assert torch.get_num_threads() == before


def test_a_codec_that_does_not_run_here_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object, **options: object) -> None:
        raise lc.ConfigError("rans runs on the CPU")

    monkeypatch.setattr(lc.QSGD, "encode", refuse)
    words = "bench", "--values", "100", "--seconds", "0.01", "--codecs", "qsgd,fp16"
    (found,) = told(*words)
    assert found["skipped"] == {"qsgd": "rans runs on the CPU"} and len(found["rows"]) == 1
    assert "skipped qsgd: rans runs on the CPU" in invoke(*words).stdout
