"""What was remarkable about a release stands in its step's detail."""

from __future__ import annotations

from tests.support.fake_control import FakeControl
from tests.support.play import MED, Play, spec, tenant
from tests.unit.agent_doubles import Place, command
from workers.control import Phase
from workers.observe import Sight
from workers.onoff import OnOff
from workers.verbs import Verbs

NOTE = "its first process did not answer TERM and was killed after 10 s"


async def test_what_a_backend_says_of_a_release_is_in_the_answer_of_its_agent() -> None:
    control = FakeControl(Phase.UP)
    control.note = NOTE
    backends = {"frigate": OnOff("frigate", control, grace_ms=10_000)}
    verbs = Verbs(backends, Sight(backends, {"frigate": Place("gpu0", "frigate")}, {}))
    outcome = await verbs.run(command("release", 7, 1, tenant="frigate", limit_ms=500))
    assert (outcome.ok, outcome.detail) == (True, NOTE)


def test_it_stands_in_the_table_of_its_swap() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="release", drain={"slots": []})
    play.answer(play.pending("release"), detail=NOTE)
    play.run()
    [step] = [one for one in play.log["sw_100"].steps if one.step == "release"]
    assert (step.outcome, step.detail) == ("done", NOTE)
