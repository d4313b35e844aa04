"""Small mistakes in the actors, in delivery and in the shell, one at a time, each of which the unit tests must find.

``tests/simulation/test_mutations.py`` plants classes of bugs and looks whether whole trials find them; this is about
single lines, and about the tests that stand closest to them. Nothing of ours is imported here: what is to be changed is
changed while it is imported (``plant_mutant.py``), and the files stay as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BUFFER, DELIVERY, SHELL = "test_actor_buffer_*.py", "test_delivery.py", "test_shell.py"
ENGINE, FILTER, LEARNER = "test_actor_engine_worker_*.py", "test_actor_filter*.py", "test_actor_learner.py"
PUBLISHER, SCORER, SOURCE = "test_actor_weight_publisher.py", "test_actor_scorer*.py", "test_actor_prompt_source_*.py"


class Mutant(NamedTuple):
    """One mistake."""

    mistake: str
    path: str
    before: str
    """As it stands in the file, once."""
    after: str
    tests: str
    """Files beside this one that have to find it."""

    @property
    def module(self) -> str:
        """The name under which the file is imported."""
        return "penstock." + self.path.removesuffix(".py").replace("/", ".")

    def planted_in(self, source: str) -> str:
        """The source with the mistake."""
        assert source.count(self.before) == 1, f"{self.path} has {self.before!r} {source.count(self.before)} times"
        return source.replace(self.before, self.after)


MUTANTS = (
    Mutant(
        "a control event that is repeated is handed on again",
        "runtime/shell/delivery.py",
        "heard.get(sender, _NEVER) >= said",
        "heard.get(sender, _NEVER) > said",
        DELIVERY,
    ),
    Mutant(
        "repeats come without a growing pause",
        "runtime/shell/delivery.py",
        "min(2 * kept.pause_s, MAX_BACKOFF * self._resend_after_s)",
        "min(kept.pause_s, MAX_BACKOFF * self._resend_after_s)",
        DELIVERY,
    ),
    Mutant(
        "the pause between repeats grows without end",
        "runtime/shell/delivery.py",
        "min(2 * kept.pause_s, MAX_BACKOFF * self._resend_after_s)",
        "2 * kept.pause_s",
        DELIVERY,
    ),
    Mutant(
        "a repeat on the wire counts as a second generation",
        "runtime/shell/delivery.py",
        "if accepted[index] != attempt:",
        "if accepted[index] == attempt:",
        DELIVERY,
    ),
    Mutant(
        "a peer that is replaced hears what was said to others",
        "runtime/shell/delivery.py",
        "again = [kept for kept in self.kept() if kept.to == name]",
        "again = list(self.kept())",
        DELIVERY,
    ),
    Mutant(
        "what belongs to a settled group is handed on",
        "runtime/shell/delivery.py",
        "            self.num_late += 1\n            return False",
        "            self.num_late += 1\n            return True",
        DELIVERY,
    ),
    Mutant(
        "the attempts of settled groups are kept for ever",
        "runtime/shell/delivery.py",
        "            self._accepted.pop(group_id, None)",
        "            pass",
        DELIVERY,
    ),
    Mutant(
        "effects happen before their records are durable",
        "runtime/shell/shell.py",
        """            if self._records:
                records, self._records = self._records, []
                self._host.commit(records)
            now_s = self._host.now_s()
            for commands, cause in effects:
                for command in commands:
                    if type(command) is Send:
                        self._send(command, cause, now_s)
                    elif _is_for_backend(command):
                        self._host.execute(command)
                    elif type(command) is ReplaceActor or type(command) is FailRun:
                        self._host.ask_supervisor(command)
""",
        """            now_s = self._host.now_s()
            for commands, cause in effects:
                for command in commands:
                    if type(command) is Send:
                        self._send(command, cause, now_s)
                    elif _is_for_backend(command):
                        self._host.execute(command)
                    elif type(command) is ReplaceActor or type(command) is FailRun:
                        self._host.ask_supervisor(command)
            if self._records:
                records, self._records = self._records, []
                self._host.commit(records)
""",
        SHELL,
    ),
    Mutant(
        "every frame counts as a gap",
        "runtime/shell/shell.py",
        "if sequence > received + 1:",
        "if sequence >= received + 1:",
        SHELL,
    ),
    Mutant(
        "a timer that was started anew fires when the old one was due",
        "runtime/shell/shell.py",
        "if self._timers.get(key) == timer_id:",
        "if key in self._timers:",
        SHELL,
    ),
    Mutant(
        "the first event of a new incarnation does not change the membership",
        "runtime/shell/shell.py",
        "            self._note_member(sender, epoch)\n        received, sequence =",
        "        received, sequence =",
        SHELL,
    ),
    Mutant(
        "what was said once to a peer without an address is dropped",
        "runtime/shell/shell.py",
        "self._queue(self._unreached.pop(name, []))",
        "self._unreached.pop(name, [])",
        SHELL,
    ),
    Mutant(
        "a census is not told how far settlements have come",
        "runtime/shell/shell.py",
        "settled_sequence=self.delivery.settled.sequence,",
        "settled_sequence=0,",
        SHELL,
    ),
    Mutant(
        "a control event is sent beside the later one that replaces it",
        "runtime/shell/shell.py",
        "return [item for item in outgoing if item.event.delivery is not CONTROL or last[type(item.event)] is item]",
        "return outgoing",
        SHELL,
    ),
    Mutant(
        "one batch more than the bound is granted",
        "actors/buffer/pacing.py",
        "announced + max_staleness + 1 - taken_at",
        "announced + max_staleness + 2 - taken_at",
        BUFFER,
    ),
    Mutant(
        "groups are granted that no step is left for",
        "actors/buffer/pacing.py",
        "    limit = min(limit, math.ceil(trainable * settings.over_sampling))\n",
        "",
        BUFFER,
    ),
    Mutant(
        "a token of the oldest version that is allowed fails the run",
        "actors/buffer/admission.py",
        "if oldest is not None and oldest < min_version:",
        "if oldest is not None and oldest <= min_version:",
        BUFFER,
    ),
    Mutant(
        "a group without old tokens is not given the time that it has",
        "actors/buffer/admission.py",
        "max(tracked.deadline, oldest + tracked.max_staleness)",
        "tracked.deadline",
        BUFFER,
    ),
    Mutant(
        "the settled floor rises by one at most",
        "actors/buffer/accounts.py",
        "        while self.floor in self.above:",
        "        if self.floor in self.above:",
        BUFFER,
    ),
    Mutant(
        "the first replacement of a group is not counted as issued",
        "actors/buffer/accounts.py",
        "if index >= self._samples_per_group)",
        "if index > self._samples_per_group)",
        BUFFER,
    ),
    Mutant(
        "a group is too short when one of its samples is",
        "actors/filter/machine.py",
        "if max(lengths) < options.min_response_tokens:",
        "if min(lengths) < options.min_response_tokens:",
        FILTER,
    ),
    Mutant(
        "a late sample begins a group anew that has gone out",
        "actors/filter/machine.py",
        "if key.group_id in self.judging or key.group_id in self._gone:",
        "if key.group_id in self.judging:",
        FILTER,
    ),
    Mutant(
        "a late sample joins a group that is being judged",
        "actors/filter/machine.py",
        "if key.group_id in self.judging or key.group_id in self._gone:",
        "if key.group_id in self._gone:",
        FILTER,
    ),
    Mutant(
        "what is replaced counts beside its replacement",
        "actors/filter/assembly.py",
        "for index in known[:-1]:",
        "for index in known[:0]:",
        FILTER,
    ),
    Mutant(
        "a group is complete before it is known what its first replacement stands for",
        "actors/filter/assembly.py",
        "(*self.samples, *self.failed) if i >= self.size)",
        "(*self.samples, *self.failed) if i > self.size)",
        FILTER,
    ),
    Mutant(
        "a user's filter is given up at the first sweep",
        "actors/filter/machine.py",
        "if sweep < self._sweep]:",
        "if sweep <= self._sweep]:",
        FILTER,
    ),
    Mutant(
        "rewards that differ by rounding alone are a spread",
        "actors/filter/machine.py",
        "max(rewards) - min(rewards) < SMALLEST_SPREAD:",
        "max(rewards) == min(rewards):",
        FILTER,
    ),
    Mutant(
        "a reward is computed once more than allowed",
        "actors/scorer/machine.py",
        "return num_tries < self.settings.num_retries and not is_fruitless",
        "return num_tries <= self.settings.num_retries and not is_fruitless",
        SCORER,
    ),
    Mutant(
        "the reward of another attempt is taken for this one's",
        "actors/scorer/machine.py",
        "item is not None and item.event.sample.attempt == event.attempt and item.reward is None:",
        "item is not None and item.reward is None:",
        SCORER,
    ),
    Mutant(
        "while every call for a group fails all of them are tried again",
        "actors/scorer/machine.py",
        "if len(failed) < len(open_ones):",
        "if len(failed) <= len(open_ones):",
        SCORER,
    ),
    Mutant(
        "a grant that is heard again opens its groups again",
        "actors/prompt_source/prompts.py",
        "range(max(0, self.total - span.first_group), span.num_groups)",
        "range(span.num_groups)",
        SOURCE,
    ),
    Mutant(
        "a replacement issues before its first census",
        "actors/prompt_source/machine.py",
        "self._may_issue = settings.epoch == 0",
        "self._may_issue = True",
        SOURCE,
    ),
    Mutant(
        "the record of a failure counts although somebody holds the sample",
        "actors/prompt_source/census.py",
        "return lease.stage not in ENDED, lease.attempt",
        "return True, lease.attempt",
        SOURCE,
    ),
    Mutant(
        "weights are taken although their digest is another",
        "actors/engine_worker/weights.py",
        "if not error and event.digest != manifest.digest:",
        "if not error and not event.digest:",
        ENGINE,
    ),
    Mutant(
        "an engine goes back to weights that were staged before those it serves",
        "actors/engine_worker/weights.py",
        "self._staged.version < self.version",
        "self._staged.version < 0",
        ENGINE,
    ),
    Mutant(
        "a sample that is revoked while it runs is not stopped",
        "actors/engine_worker/machine.py",
        "        if request is not None:\n            self._abort(request)\n",
        "        if request is not None:\n",
        ENGINE,
    ),
    Mutant(
        "a batch that comes again is not answered with its receipt",
        "actors/learner/machine.py",
        "        if event.version <= self.version:\n            stand =",
        "        if event.version < self.version:\n            stand =",
        LEARNER,
    ),
    Mutant(
        "a checkpoint that is named to a predecessor is loaded",
        "actors/learner/machine.py",
        "if self.phase is not Phase.STARTING or event.learner_epoch != self.settings.epoch:",
        "if self.phase is not Phase.STARTING:",
        LEARNER,
    ),
    Mutant(
        "one fetch more than allowed is tried",
        "actors/weight_publisher/machine.py",
        "if engine.num_fetch_errors > self.settings.max_fetch_retries:",
        "if engine.num_fetch_errors > self.settings.max_fetch_retries + 1:",
        PUBLISHER,
    ),
    Mutant(
        "the best version is that of the newest publish",
        "actors/weight_publisher/exports.py",
        "return export.manifest.version, export.manifest.publish",
        "return export.manifest.publish, export.manifest.version",
        PUBLISHER,
    ),
    Mutant(
        "a learner that repeats what it started with is offered batches that a checkpoint covers",
        "actors/buffer/learner_side.py",
        "self.stand = max(version, self._books.checkpoint_version)",
        "self.stand = version",
        BUFFER,
    ),
    Mutant(
        "a buffer that takes another's place takes what it asked to be archived for archived",
        "actors/buffer/run_state.py",
        "self._archived_through = self._books.released_through",
        "self._archived_through = max(0, self._books.checkpoint_version)",
        BUFFER,
    ),
    Mutant(
        "a checkpoint that was demanded is written after every batch",
        "actors/learner/saving.py",
        "self._demanded = None  # what is demanded of a later version is demanded still",
        "pass",
        LEARNER,
    ),
    Mutant(
        "the record of an old failure counts as a holding",
        "actors/prompt_source/machine.py",
        "if found is not None and not is_outdated(lease, found[1]):",
        "if found is not None:",
        SOURCE,
    ),
    Mutant(
        "what was given up keeps its slot when word of that was lost",
        "actors/prompt_source/recovering.py",
        "(found.attempt < lease.attempt or lease.state is LeaseState.FAILED)",
        "found.attempt < lease.attempt",
        SOURCE,
    ),
    Mutant(
        "a stop does not ask for what is trained meanwhile",
        "actors/buffer/machine.py",
        "self.run.stepped()",
        "pass",
        BUFFER,
    ),
    Mutant(
        "an announced version goes down with the engines that serve it",
        "actors/weight_publisher/announcing.py",
        "if newest <= self.version:",
        "if newest == self.version:",
        PUBLISHER,
    ),
    Mutant(
        "weights that another learner made again have to be those of the first time",
        "actors/weight_publisher/exports.py",
        'self._checksums.get(publish, {}).get(layout, "")',
        'next((sums[layout] for sums in self._checksums.values() if layout in sums), "")',
        PUBLISHER,
    ),
)
