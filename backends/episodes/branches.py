"""The conversations of a session: which one a request goes on with, or where it branches off.

Invariants:

* A request goes on from the latest place whose chat, or text, it repeats. Where that is the end of a conversation, the
  conversation grows; elsewhere a new one begins with the very tokens that stood there.
* One that repeats nothing (its history was edited, shortened or summed up) begins a conversation of its own, rendered
  and tokenised anew. All of that is context.
* Not more than ``episode.max_parts`` conversations are begun.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from penstock.backends.episodes.dialogue import ChatDialogue, ConversationError, TextDialogue
from penstock.messages.arrays import tokens_view

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.episodes.protocol import Episode
    from penstock.messages.samples import Media

    Dialogue = ChatDialogue | TextDialogue
    Added = tuple[list[int], tuple[Media, ...]]


DialogueT = TypeVar("DialogueT", ChatDialogue, TextDialogue)


class Place(NamedTuple):
    """Where a conversation stood after an answer."""

    conversation: int
    num_tokens: int
    """Of the conversation up to there."""
    dialogue: Dialogue
    choice_of: int | None = None
    """The conversation that may go on with this choice; None: it is no choice, or was taken."""


class Start(NamedTuple, Generic[DialogueT]):
    """Where an answer is to be made."""

    tokens: list[int]
    """To put after what there is; of a new conversation, all that it begins with."""
    num_before: int
    """Tokens that the model sees."""
    dialogue: DialogueT
    """A copy of its own."""
    before: list[int]
    """That stand there already."""
    place: Place | None
    """That it goes on from; None: it is a new conversation."""
    media: tuple[Media, ...] = ()
    """Images that stand in ``tokens``, counted from the first of them."""
    seen: tuple[Media, ...] = ()
    """Likewise, in ``before``."""


class Branches:
    """See the module."""

    def __init__(self, episode: Episode, max_parts: int) -> None:
        self._episode = episode
        self._max_parts = max_parts
        self._num_parts = self._num_numbers = 0
        self._places: list[Place] = []

    def start(self, fresh: DialogueT, tokens_for: Callable[[DialogueT, list[int]], Added]) -> Start[DialogueT]:
        """Where this request is answered; ``tokens_for`` says what it adds to a dialogue and its tokens, and which
        images stand there. Nothing changes until :meth:`begin`.

        Raises:
            ConversationError: it goes on from nothing, and there are as many conversations as there may be.
            MalformedError: it cannot be made into tokens.
        """
        refusal: ConversationError | None = None
        for place in reversed(self._places):
            if not isinstance(place.dialogue, type(fresh)):
                continue
            dialogue, whole = copy.copy(place.dialogue), self._tokens(place.conversation)
            before: list[int] = whole[: place.num_tokens]
            try:
                new, media = tokens_for(dialogue, before)
            except ConversationError as error:
                refusal = refusal or error
                continue
            there = self._episode.media_of(place.conversation)
            seen = tuple(each for each in there if each.at < place.num_tokens)
            start = Start(new, len(before) + len(new), dialogue, before, place, media, seen)
            if len(whole) == place.num_tokens:
                return start
            self._check_room(refusal)
            tokens, media = one_after_the_other(before, seen, new, media)
            return Start(tokens, len(tokens), dialogue, [], None, media)
        new, media = tokens_for(fresh, [])
        self._check_room(refusal)
        return Start(new, len(new), fresh, [], None, media)

    def begin(self, start: Start[ChatDialogue] | Start[TextDialogue]) -> int:
        """An answer is made there: in this conversation."""
        place = start.place
        if place is None:
            self._num_parts += 1
            return self.new_number()
        if place.choice_of is None:
            return place.conversation
        return self._take(place, place.choice_of)

    def new_number(self) -> int:
        """Of one more conversation."""
        self._num_numbers += 1
        return self._num_numbers - 1

    def answered(self, conversation: int, dialogue: Dialogue, choice_of: int | None = None) -> None:
        """The conversation stands behind an answer."""
        self._places.append(Place(conversation, len(self._tokens(conversation)), dialogue, choice_of))

    def take(self, conversation: int) -> None:
        """This choice counts, if it was made."""
        for place in [place for place in self._places if place.conversation == conversation]:
            if place.choice_of is not None:
                self._take(place, place.choice_of)

    def _take(self, choice: Place, of: int) -> int:
        self._episode.take(choice.conversation, of)
        is_merged = not self._episode.num_turns_of(choice.conversation)
        number = of if is_merged else choice.conversation
        self._num_parts += not is_merged
        self._places[self._places.index(choice)] = choice._replace(conversation=number, choice_of=None)
        return number

    def _check_room(self, why: ConversationError | None) -> None:
        if self._num_parts >= self._max_parts:
            limit = f"episode.max_parts allows no further conversation in this session ({self._max_parts})"
            raise ConversationError(f"{why}; {limit}" if why else limit)

    def _tokens(self, conversation: int) -> list[int]:
        """Of a conversation that something was said in."""
        has_turns = self._episode.num_turns_of(conversation)
        return tokens_view(self._episode.so_far(conversation)).tolist() if has_turns else []


def one_after_the_other(
    before: list[int], seen: tuple[Media, ...], tokens: list[int], media: tuple[Media, ...]
) -> tuple[list[int], tuple[Media, ...]]:
    """Both as one sequence, with the images of both."""
    return [*before, *tokens], (*seen, *(each.moved(len(before)) for each in media))
