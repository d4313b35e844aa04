"""The episode of search.yaml: the model may search before it answers."""

from pathlib import Path

from penstock.backends.episodes.play import End, Play
from penstock.backends.episodes.tools import LocalSearch

SEARCH = LocalSearch(Path(__file__).with_name("search.jsonl"), num_results=1)


async def episode(play: Play) -> End:
    """``where is kira?`` is answered with ``(kira)``, which brings ``=kira lives in oslo;``, and then ``oslo``."""
    turn = await play.generate(stop=[")"])
    num_searches = num_hits = 0
    while turn.ended_by == "stop_string":
        found = await play.call(SEARCH.find(turn.text.removeprefix("(")))
        num_searches, num_hits = num_searches + 1, num_hits + len(found)
        result = found[0].document.text if found else "nothing"
        turn = await play.generate(f"={result};", stop=[")"])
    is_right = turn.text == play.task.label
    return End(reward=float(is_right), components={"searches": num_searches, "hits": num_hits})
