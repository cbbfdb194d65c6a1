"""Every block of code in every document works, and every link leads somewhere."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from doc_blocks import (
    EXEMPT,
    ROOT,
    SHELLS,
    Block,
    Wrong,
    blocks,
    check_calls,
    check_command,
    check_diff,
    check_dockerfile,
    check_example,
    check_shell,
    example_of,
    is_cheap,
    run,
)

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    block for page in PAGES for block in blocks(str(page.relative_to(ROOT)), page.read_text())
]


def of(*languages: str) -> list[object]:
    return [pytest.param(one, id=str(one)) for one in BLOCKS if one.language in languages]


def hook() -> ModuleType:
    """What fills in pages when the site is built."""
    spec = importlib.util.spec_from_file_location("_pages", ROOT / "docs" / "_pages.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, and no process group left behind."""
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("block", None)
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the block leaves a process group behind: dist.destroy_process_group()")


def test_there_are_blocks_of_every_kind() -> None:
    assert {"python", "diff", "sh"} <= {block.language for block in BLOCKS}
    assert len(BLOCKS) >= 50


def test_every_block_has_a_language_that_is_tested() -> None:
    known = {"python", "diff", "yaml", "json", "dockerfile", *SHELLS, *EXEMPT}
    wrong = [f"{block} ({block.language or 'none'})" for block in BLOCKS]
    wrong = [told for told, block in zip(wrong, BLOCKS, strict=True) if block.language not in known]
    assert not wrong, f"give each one of {sorted(known)}: {wrong}"


@pytest.mark.parametrize("block", of("python"))
@pytest.mark.usefixtures("elsewhere")
def test_python_runs(block: Block) -> None:
    example = example_of(block.text)
    if example:
        check_example(*example)  # the example's own test runs it
        return
    module = types.ModuleType("block")
    sys.modules["block"] = module  # for whoever looks a class up by its module
    exec(compile(block.text, str(block), "exec"), module.__dict__)
    check_calls(ast.parse(block.text))  # in functions that are not called, too


@pytest.mark.parametrize("block", of("diff"))
def test_a_diff_changes_python_into_python(block: Block) -> None:
    check_diff(block.text)


@pytest.mark.parametrize("block", of(*SHELLS))
@pytest.mark.usefixtures("elsewhere")
def test_commands_are_understood(block: Block) -> None:
    for args in check_shell(block):
        if is_cheap(args):
            run(args)


@pytest.mark.usefixtures("elsewhere")
def test_examples_of_the_programs_own_help_are_understood() -> None:
    """They are on the page of commands, too."""
    pytest.importorskip("typer")
    found = list(blocks("laconic --help", hook().commands()))
    assert len(found) > 3
    for block in found:
        for args in check_shell(block):
            if is_cheap(args):
                run(args)


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_yaml(block: Block) -> None:
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load(block.text)
    assert found is not None
    for name in ("setup", "run"):  # of SkyPilot
        check_shell(Block(str(block), 1, "bash", found.get(name, "")))


@pytest.mark.parametrize("block", of("dockerfile"))
def test_dockerfiles_are_understood(block: Block) -> None:
    check_dockerfile(block.text)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("RUN pip install laconic", "FROM"),
        ("FROM a\nRNU pip install laconic", "RNU"),
        ("FROM a\nRUN pip install 'laconic[nothing]'", "nothing"),
        ('FROM a\nCMD ["torchrun", "nothing.py"]', "nothing"),
    ],
)
def test_a_wrong_dockerfile_is_seen(text: str, match: str) -> None:
    with pytest.raises(Wrong, match=match):
        check_dockerfile(text)


@pytest.mark.parametrize("block", of("json"))
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


# -- links


def headings(text: str) -> set[str]:
    """Anchors as GitHub and as MkDocs make them."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found = set()
    for title in re.findall(r"^#+ +(.+?) *$", plain, re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", title.lower().replace("`", "")).strip()
        found |= {words.replace(" ", "-"), re.sub(r"[-\s]+", "-", words)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        other = (page.parent / name) if name else page
        assert other.exists(), target
        if anchor:
            assert anchor in headings(other.read_text()), target


# -- the rules themselves


def block(text: str, language: str = "sh") -> Block:
    return Block("a page", 1, language, text)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("laconic plam --all", "plam"),
        ("laconic plan --wrokers 4", "wrokers"),
        ("laconic plan --workers four", "four"),
        ("laconic lab run --hots 3 -- python train.py", "hots"),
        ("laconic lab run -- python nowhere.py", "nowhere"),
        ("python -m laconic plan --nothing", "nothing"),
        ("torchrun --nproc-per-node 2 -m laconic prob", "prob"),
        ("A=1 laconic plam", "plam"),
        ("make venv && laconic plam", "plam"),
        ("laconic codecs \\\n  --jsno", "jsno"),
        ("make everything", "everything"),
        ("python -m benchmarks.nothing", "nothing"),
        ("python -m nonsense_module", "nonsense"),
        ("python -m pytest tests/test_nothing.py", "nothing"),
        ("python examples/nothing.py", "nothing"),
        (".venv/bin/python examples/nothing.py", "nothing"),
        ("torchrun --nproc-per-node 2 examples/nothing.py", "nothing"),
        ("accelerate launch examples/nothing.py", "nothing"),
        ("srun torchrun examples/nothing.py", "nothing"),
        ("torchx run dist.ddp -j 1x2 --script examples/nothing.py", "nothing"),
        ("torchx run dist.ddp -j 1x2 -m laconic -- prob", "prob"),
        ("pip install 'laconic[nothing]'", "nothing"),
        ("pip install -e '.[nothing]'", "nothing"),
        ("frobnicate --now", "no rule"),
        ("for x in", "bash"),
        ("echo 'open", "bash"),
    ],
)
def test_a_wrong_command_is_seen(line: str, match: str) -> None:
    with pytest.raises(Wrong, match=match):
        check_shell(block(line + "\n"))


@pytest.mark.parametrize(
    "line",
    [
        "laconic plan --probe probe.json --workers 64  # a comment",
        "laconic lab run --hosts 4 --rate 100mbit -- python train.py --epochs 3",
        "torchrun --nnodes 4 ... -m laconic probe --out probe.json",
        "laconic --version",
        "laconic plan --help",
        "make test bench GRADIENTS=file.npz",
        "cd somewhere && make demo",
        "python examples/parameter_server.py",
        "pip install 'laconic[cli,plot]'",
        "python -m pytest -s -k digits tests/integrations/test_fsdp.py",
    ],
)
def test_a_right_command_is_allowed(line: str) -> None:
    check_shell(block(line + "\n"))


def test_only_lines_behind_a_prompt_are_typed() -> None:
    assert check_shell(block("$ laconic codecs\nfp16  half\n", "console")) == [["codecs"]]
    with pytest.raises(Wrong, match="begins with"):
        check_shell(block("laconic codecs\n", "console"))


def test_commands_that_are_run_are_run(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["plan", "--link", "1gbit", "--params", "1m", "--compute", "1s"], ["codecs"]):
        assert is_cheap(args)
        run(args)
        assert capsys.readouterr().out
    for text in ("race", "plan --probe p.json", "plan --link 1gbit --plot p.html", "codecs --help"):
        assert not is_cheap(text.split())
    with pytest.raises(Wrong, match="abacus"):
        run(["plan", "--machine", "abacus", "--params", "1m", "--compute", "1s"])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("+lc.kompress(model, 'fp16')", "kompress"),
        ("+lc.compress(model, 'fp17')", "fp17"),
        ("+lc.compress(model, 'dqsg:bits=4@allreduce')", "all-reduce"),
        ("+lc.compress(model, 'fp16', warmup=3)", "arguments"),
        ("+lc.compress(model)", "arguments"),
        ("+lc.SSD(optimizer, model, period=4, codek='none')", "arguments"),
        ("+lc.SSD(optimizer, model, period=4, pull_codec='nil')", "nil"),
        ("+handle = lc.compress(model, 'fp16'", "no Python"),
        ("-model = (\n+model = 3", "no Python"),
        ("model = 3\n+x = 1", "begins with"),
        (" model = 3\n x = 1", "nothing is changed"),
        (" # examples/nothing.py\n+x = 1", "nothing"),
        (" # examples/digits.py\n+x = no_such_line()", "no_such_line"),
    ],
)
def test_a_wrong_diff_is_seen(text: str, match: str) -> None:
    with pytest.raises(Wrong, match=match):
        check_diff(text + "\n")


def test_a_diff_of_an_example_has_its_lines_in_order() -> None:
    lines = [
        line
        for line in (ROOT / "examples" / "digits.py").read_text().splitlines()
        if line.startswith(("import ", "from "))
    ]
    first, second = lines[:2]
    check_diff(f" # examples/digits.py\n {first}\n+{second}\n")
    with pytest.raises(Wrong, match="or not there"):
        check_diff(f" # examples/digits.py\n {second}\n+{first}\n")


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("def f():\n    lc.codek('fp16')", "codek"),
        ("def f():\n    lc.codec('fp17')", "fp17"),
        ("lc.HookState(model, 'fp17')", "fp17"),
        ("lc.compress(model, spec='fp17')", "fp17"),
    ],
)
def test_a_wrong_call_is_seen(source: str, match: str) -> None:
    with pytest.raises(Wrong, match=match):
        check_calls(ast.parse(source))


def test_a_call_that_is_tried_may_be_wrong() -> None:
    check_calls(ast.parse("try:\n    lc.codec('fp17')\nexcept lc.ConfigError:\n    pass"))


def test_a_block_of_an_example_is_that_file() -> None:
    path = ROOT / "examples" / "digits.py"
    check_example(path, path.read_text())
    with pytest.raises(Wrong, match="copy it again"):
        check_example(path, path.read_text() + "more\n")
    with pytest.raises(Wrong, match="there is no"):
        check_example(ROOT / "examples" / "nothing.py", "")
    found = example_of("# examples/digits.py\nimport x\n")
    assert found == (path, "import x\n")
    assert example_of("import x\n") is None


def test_blocks_are_found_wherever_they_stand() -> None:
    text = "```\na\n```\n- item\n\n  ```sh\n  b\n  ```\n\n````text\n```python\n```\n````\n"
    text += "~~~json\n1\n~~~\n"
    found = [(one.language, one.text) for one in blocks("p", text)]
    assert found == [("", "a\n"), ("sh", "b\n"), ("text", "```python\n```\n"), ("json", "1\n")]
    with pytest.raises(Wrong, match="never closed"):
        list(blocks("p", "```sh\nx\n"))


def test_commands_in_commands_are_found() -> None:
    assert check_command(["laconic", "lab", "run", "--", "laconic", "codecs"]) == [
        ["lab", "run", "--", "laconic", "codecs"],
        ["codecs"],
    ]
