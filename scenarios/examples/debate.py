"""The episode of debate.yaml: one agent claims, one objects, the first replies, and a judge decides between them."""

from penstock.backends.data.lines import lines_reward
from penstock.backends.episodes.play import End, Play


async def episode(play: Play) -> End:
    """Each is shown what was said, and then the question; the answer that the judge is nearer to earns the reward."""
    question, label = play.task.prompt, play.task.label
    objector = play.conversation("objector")
    judge = play.conversation("judge", is_trained=False)  # it reads and decides, and nothing of it is trained

    claim = (await play.generate()).text
    objection = (await objector.generate(f"{claim}\n{question}")).text
    reply = (await play.generate(f"\n{objection}\n{question}")).text
    verdict = (await judge.generate(f"{reply}\n{objection}\n{question}")).text

    replier_wins = lines_reward(reply, verdict, truncated=False) >= lines_reward(objection, verdict, truncated=False)
    winner = reply if replier_wins else objection
    components = {
        "claim": lines_reward(claim, label, truncated=False),
        "reply": lines_reward(reply, label, truncated=False),
        "replier_wins": float(replier_wins),
    }
    return End(reward=lines_reward(winner, label, truncated=False), components=components)
