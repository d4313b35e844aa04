"""Launch scripts are read as bash reads them, with nothing run."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from penstock.messages.errors import UserFault
from penstock.runtime.slime.script import Flag, read_script
from penstock.runtime.slime.shell import MAX_STEPS

if TYPE_CHECKING:
    from pathlib import Path

# Each prints what it hands to train.py; bash itself is asked as well.
SCRIPTS = {
    "a variable": "A=3\npython train.py --x $A --y \"${A}b\" --z '$A'\n",
    "a default": 'python train.py --x ${NO_SUCH:-4} --y "${NO_SUCH:-a b}" --z ${NO_SUCH:-${NEITHER:-5}}\n',
    "a default that is set": ": ${A:=7}\nA=\npython train.py --x ${A:-8} --y ${A-9} --end\n",
    "an array": 'A=(--x 1\n  # --not this\n  --y "2 3" # nor this\n)\nA+=(--z 4)\npython train.py "${A[@]}"\n',
    "an array without quotes": 'A=(--x "1 2")\npython train.py ${A[@]} ${NO_ARRAY[@]} --last\n',
    "an element": "A=(5 6 7)\npython train.py --x ${A[1]} --n ${#A[@]} --i ${A[2]}\n",
    "arithmetic": "A=3\nB=$((A * 2 + 1))\n"
    "python train.py --x $(( 4 * 512 )) --y $((B / 2)) --z $((-7 / 2)) --w $(($A % 2))\n",
    "a sequence": "python train.py --x 1 2 4 $(seq 8 8 24) --y $(seq 3) --z $(seq 5 -2 1)\n",
    "names of files": "F=/a/b/c.sh\n"
    "python train.py --x $(dirname $F) --y $(basename $F .sh) --z ${F##*/} --w ${F%.sh}\n",
    "a loop over numbers": (
        "arr=()\nfor ((i=0; i<4; i++)); do\n  if (( i < 1 )); then\n    arr+=(0)\n  else\n    arr+=(1)\n  fi\ndone\n"
        'printf -v FREQ "[%s]" "$(IFS=\', \'; echo "${arr[*]}")"\npython train.py --x "$FREQ"\n'
    ),
    "a loop over words": 'for each in a "b c"; do A+=(--x "$each"); done\npython train.py "${A[@]}"\n',
    "a condition": 'A=2\nif [ "$A" -gt 1 ] && [[ $A != 3 ]]; then B=yes; elif true; then B=no; fi\n'
    "python train.py --x $B\n",
    "a condition that fails": "A=2\nif [ $A = 3 ]; then B=yes; else B=no; fi\npython train.py --x $B\n",
    "continued lines": "python train.py \\\n  --x 1 \\\n  --y \\\n 2\n",
    "a here-document": "cat <<EOF > /dev/null\npython train.py --not me's\nEOF\npython train.py --x 1\n",
    "a backslash": 'python train.py --x a\\ b --y "a\\"b" --z \\$A\n',
    "an equals sign": 'A=3\npython train.py --x=$A --y="a b"\n',
    "a function that nobody calls": "f() {\n  A=2\n}\nA=1\npython train.py --y 1\n",
    "an assignment for one command": "A=1 true\npython train.py --y ok\n",
    "joined texts": "A=/models\nB=model\npython train.py --x \"${A}\"/${B}_$((1+1))'/end'\n",
    "adding to a text": "A=a\nA+=b\npython train.py --x $A${A:+c}${#A}\n",
    "launched by ray": 'J=\'{\n "a": "--not-a-flag"}\'\ntrue --address=x --json="${J}" \\\n'
    "  -- && python3 train.py --x 1 2>&1\n",
}


def words_of(path: Path) -> list[str]:
    return [word for flag in read_script(path).flags for word in (f"--{flag.name}", *flag.values)]


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_flags_are_those_that_bash_would_hand_on(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPTS[name])
    shown = 'python() { shift; printf "%s\\0" "$@"; }\npython3() { python "$@"; }\n'
    done = subprocess.run(
        ["bash", "-c", shown + SCRIPTS[name]], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 0, done.stderr
    words = [part for word in done.stdout.split("\0")[:-1] for part in _parts(word)]
    assert words_of(path) == words


def _parts(word: str) -> list[str]:
    """``--x=1`` as the two words that it stands for."""
    return word.split("=", 1) if word.startswith("--") and "=" in word else [word]


def test_sourced_files_are_followed_and_their_flags_have_their_place(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "base.sh").write_text("ARGS=(\n  --layers ${LAYERS:-4}\n  --width $((2 * 8))\n)\n")
    (tmp_path / "models" / "five.sh").write_text('LAYERS=5 source "$(dirname -- "${BASH_SOURCE[0]}")/base.sh"\n')
    path = tmp_path / "run.sh"
    path.write_text(
        'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
        'source "${HERE}/models/five.sh"\npython3 train.py ${ARGS[@]} --x 1\n'
    )
    flags = read_script(path).flags
    assert flags[0] == Flag("layers", ("5",), 2, "base.sh")
    assert flags[1] == Flag("width", ("16",), 3, "base.sh")
    assert flags[2] == Flag("x", ("1",), 3)


def test_a_file_of_another_machine_is_found_around_the_script(tmp_path: Path) -> None:
    (tmp_path / "scripts" / "models").mkdir(parents=True)
    (tmp_path / "scripts" / "models" / "m.sh").write_text("A=(--x 1)\n")
    path = tmp_path / "examples" / "run.sh"
    path.parent.mkdir()
    path.write_text('source "/elsewhere/slime/scripts/models/m.sh"\npython train.py ${A[@]} --y 2\n')
    assert words_of(path) == ["--x", "1", "--y", "2"]


def test_what_cannot_be_followed_is_said_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "source models/none.sh\n"
        "N=$(nvidia-smi -L | wc -l)\n"
        'if [ "$N" -gt 4 ]; then\n  TP=8\nelse\n  TP=2\nfi\n'
        "python train.py --path ${BASE}/m --gpus $N --tp $TP --log $(date +%s).txt --half $((N / 2)) \n"
        "   --lost 1\n"
    )
    script = read_script(path)
    assert [(unread.line, *unread.values) for unread in script.unread] == [
        (1, "sources models/none.sh, which is not here: its flags are missing"),
        (9, "the line before lacks its backslash: bash takes this for another command; read as part of the first"),
    ]
    found = {flag.name: (flag.values[0], *flag.unread) for flag in script.flags}
    assert found == {
        "path": ("${BASE}/m", "$BASE is set nowhere in the script"),
        "gpus": ("$(nvidia-smi -L | wc -l)", "$(nvidia-smi -L | wc -l) is run by the shell"),
        "tp": ("8", "the condition in line 3 of run.sh is taken to hold"),
        "log": ("$(date +%s).txt", "$(date +%s) is run by the shell"),
        "half": ("$((N / 2))", "$((N / 2)) has no value here"),
        "lost": ("1",),
    }


def test_the_last_training_of_a_script_counts_and_the_others_are_said(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python train.py --x 1\npython train_async.py --x 2\n")
    script = read_script(path)
    assert (script.program, script.flags) == ("train_async.py", (Flag("x", ("2",), 2),))
    assert [(unread.line, *unread.values) for unread in script.unread] == [
        (1, "starts a training too; only the last one of the script is converted")
    ]


@pytest.mark.parametrize(
    "script",
    [
        'J="{\\"env_vars\\": {\\"OPEN_TRAINING_INT4_FAKE_QAT_FLAG\\": \\"1\\"}}"\n'
        'ray job --env="$J" -- python train.py --x 1\n',
        "export OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1\n\npython train.py --x 1\n",
    ],
)
def test_options_in_the_environment_are_said(tmp_path: Path, script: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script)
    (unread,) = read_script(path).unread
    assert unread.values[0].startswith("sets OPEN_TRAINING_INT4_FAKE_QAT_FLAG, which changes what slime trains")


def test_nothing_is_run(tmp_path: Path) -> None:
    path, mark = tmp_path / "run.sh", tmp_path / "mark"
    path.write_text(
        f"touch {mark}\nA=$(touch {mark}; echo 1)\necho 1 > {mark}\npython train.py --x $A `touch {mark}`\n"
    )
    read_script(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello\n", "no command in it starts slime's train.py"),
        ("trainer: {total_epochs: 15}\n", "the keys of verl and TRL are in docs/from_verl.md"),
        ("python train.py\n", "run.sh:1: there is not one --flag behind train.py"),
        ("A=(\n --lr 'open\n", "run.sh:.*never ends"),
        ("A=(--lr 1\n", "run.sh:1: an array that begins here never ends"),
        ("python3 train.py --lr 1 \\\n", "run.sh:1: .*never ends"),
        ("x\nif true; then\n python train.py --x 1\n", "run.sh:2: 'if' begins here and never ends; expected 'fi'"),
        ("for ((i=0; i<1; i+=0)); do A=1; done\npython train.py --x 1\n", f"run.sh:1: more than {MAX_STEPS:,} steps"),
        ('source "${BASH_SOURCE[0]}"\n', "source one another more than 16 deep"),
        ("A=aaaaaaaaaaaaaaaaaaaaaaaa\nfor ((i=0; i<99; i++)); do A=$A$A; done\n", "the value of A has more than"),
        ("fi\n", "run.sh:1: 'fi' has nothing that it belongs to"),
    ],
)
def test_what_is_no_launch_script_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    with pytest.raises(UserFault, match=message):
        read_script(path)
    with pytest.raises(UserFault, match="cannot be read"):
        read_script(tmp_path / "nothing.sh")
