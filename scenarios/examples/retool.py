"""The episode of retool.yaml: the model may run Python before it answers."""

from penstock.backends.episodes.play import End, Play
from penstock.backends.episodes.tools import PythonTool

PYTHON = PythonTool(wall_s=5, cpu_s=2, memory_bytes=128 << 20, packages=False)


async def episode(play: Play) -> End:
    """``47*38=`` is answered with ``(47*38)``, whose value is put after it, ``=1786;``, and then ``1786``."""
    turn = await play.generate(stop=[")"])
    num_programs = num_failed = 0
    while turn.ended_by == "stop_string":
        printed = await play.call(PYTHON.run(f"{turn.text})"))
        has_worked = printed.isdigit()  # a traceback has characters that this small model does not know
        num_programs, num_failed = num_programs + 1, num_failed + (not has_worked)
        turn = await play.generate(f"={printed if has_worked else '?'};", stop=[")"])
    is_right = turn.text == play.task.label
    return End(reward=float(is_right), components={"programs": num_programs, "failed_programs": num_failed})
