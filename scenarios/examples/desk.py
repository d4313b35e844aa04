"""The episode of desk.yaml: a clerk, a simulated user who says what he wants when he is asked, and a database.

The user is a script, as the model here is tiny. With a model that chats, let another conversation of the episode play
him: ``user = play.conversation("user", is_trained=False)``, with the wish in its first message (debate.py has two).
"""

from penstock.backends.episodes.play import End, Play

GUESTS = {"ann": "A", "bob": "B", "kim": "C"}


class User:
    """Somebody with a wish."""

    def __init__(self, wish: str) -> None:
        self._wish = wish

    def answer(self, question: str) -> str:
        """What he says; only a question that he understands brings the wish to light."""
        return f"room {self._wish}" if question == "which?" else "what?"


class Desk:
    """The database, and what the clerk may do with it."""

    def __init__(self) -> None:
        self.rooms = dict(GUESTS)

    def find(self, name: str) -> str:
        """The room of a guest."""
        return self.rooms.get(name, "nobody")

    def move(self, what: str) -> str:
        """``kim Q`` puts kim into room Q."""
        name, _, room = what.partition(" ")
        if name not in self.rooms or len(room) != 1:
            return "no"
        self.rooms[name] = room
        return "ok"


async def episode(play: Play) -> End:
    """``kim: move me.`` is answered with ``(ask which?)``, which brings ``=room Q;``, then ``(move kim Q)``, which
    brings ``=ok;``, and ``bye``. The reward is what the database says in the end."""
    name, _, wish = play.task.label.partition(" ")
    desk, user = Desk(), User(wish)
    tools = {"ask": user.answer, "find": desk.find, "move": desk.move}
    num_asked = num_moves = 0
    turn = await play.generate(stop=[")"])
    while turn.ended_by == "stop_string":
        called, _, argument = turn.text.removeprefix("(").partition(" ")
        num_asked, num_moves = num_asked + (called == "ask"), num_moves + (called == "move")
        said = tools[called](argument) if called in tools else "no"
        turn = await play.generate(f"={said};", stop=[")"])
    is_right = desk.rooms == {**GUESTS, name: wish}
    return End(reward=float(is_right), components={"asked": num_asked, "moves": num_moves})
