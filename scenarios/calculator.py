"""The episode of calculator.yaml: the model may ask a calculator before it answers."""

from penstock.backends.episodes.interfaces import ToolError
from penstock.backends.episodes.play import End, Play
from penstock.backends.episodes.tools.calculator import calculate


async def episode(play: Play) -> End:
    """``47*38=`` is answered with ``(47*38)``, which brings ``=1786;``, and then ``1786``; or not at all."""
    turn = await play.generate(stop=[")"])
    num_calls = 0
    while turn.ended_by == "stop_string":
        num_calls += 1
        try:
            result = calculate(turn.text.removeprefix("("))
        except ToolError:
            result = "?"
        turn = await play.generate(f"={result};", stop=[")"])
    return End(reward=float(turn.text == play.task.label), components={"calls": num_calls})
