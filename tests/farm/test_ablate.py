"""`farm ablate` against a real HTTP server: every way's rates, faults and tokens are those of the answers that were played.

The answers are written by hand for these tests: no measurement of any model.
"""

import asyncio
import json

import pytest
from chat_server import ChatServer, completion, failure
from farm_here import farm_here
from model_runs import CACHE, PROGRAM, SKETCH, SPEC, fenced, review_here
from test_direct_sweep import CPP, PLAN

from catalog.artifacts import Artifacts
from catalog.locations import Location
from farm.ablation import WAYS, Ablation, Problem, WayTally
from farm.foreign import Refused, read_source
from farm.model_search import ModelSearch
from farm.model_settings import read_settings
from farm.plan import Budget
from farm.plan_file import read_plan
from farm.search import Versions
from generator.authors.clients import OpenAIClient, RecordedClient
from generator.authors.endpoint import Endpoint
from generator.authors.transcripts import TranscriptStore

pytestmark = pytest.mark.usefixtures("any_pace")
WRONG = PROGRAM.replace("kv <= q", "kv < q")
BROKEN = PROGRAM.replace("Compute mi = mnew", "Swap mi, mnew")


def ablate(tmp_path, server, *flags, key="sk-test-0123456789"):
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN.replace("author: llm-direct\n", "").replace("repairs: 4, improvements: 0", "max_tokens: 8192"))
    where = ["--base-url", server.base_url] if server else []
    command = ["ablate", str(path), "--catalog", str(tmp_path / "catalog"), "--executor", "local", *where, "--quiet", *flags]
    return farm_here(*command, OPENAI_API_KEY=key, FARM_CACHE=str(CACHE))


class Playing:
    """Answers in turn, by what is asked for: the second sample of each kind is faulty."""

    def __init__(self):
        self.answers = {
            "code": [fenced(PROGRAM), fenced(WRONG)],
            "at once": [fenced(BROKEN), "I would rather not."],
            "Translate the program": [CPP],
            "fastest kernel that is right": [CPP, CPP.replace('"LSE"]', '"LSE", "P"]')],
        }

    def __call__(self, request, _):
        said = request["messages"][-1]["content"]
        if "tagged `sketch`" in said:
            return completion(f"```sketch\n{SKETCH}```")
        for words in ("at once", "Translate the program", "fastest kernel that is right"):
            if words in said:
                return completion(self.answers[words].pop(0))
        return completion(self.answers["code"].pop(0))


def count(tmp_path, client, store):
    """The tallies of an ablation whose attempts are not compiled: what reaches the compiler is taken for right."""

    async def attempt(job):
        reason, message = job.trouble or ("ok", "")
        if job.source and isinstance(refused := read_source(job), Refused):
            reason, message = refused.reason, refused.message
        return {"reason_code": reason, "message": message, "p50_s": 1e-5, "row_id": "row", "compile_s": 0.5}

    settings = read_settings("llm", {"model": "test-model", "samples": 2, "repairs": 0, "improvements": 0}, Budget())
    artifacts = Artifacts(Location.of(tmp_path / "catalog"))
    search = ModelSearch(read_plan(PLAN, "plan.yaml"), Versions("1", "1"), settings, client, store, artifacts)
    tallies = tuple(WayTally(way) for way in WAYS)
    asyncio.run(Ablation(search, tallies).solve(SPEC, "cpu-avx2", attempt))
    return {tally.way.key: tally.plain(2) for tally in tallies}


def test_every_way_is_counted_and_a_replay_counts_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("farm.model_search.review_apart", review_here)
    store = TranscriptStore(tmp_path / "transcripts")
    with ChatServer(Playing()) as server:
        ways = count(tmp_path, OpenAIClient(Endpoint(server.base_url, "sk-test"), store), store)
        asked = len(server.requests)
    rates = {name: (way["pass_at_1"], way["pass_at_k"], way["samples_judged"]) for name, way in ways.items()}
    assert rates == {
        "two-stage/ours": (0.5, 1.0, 2),
        "two-stage/model": (0.5, 1.0, 2),
        "one-pass/ours": (0.0, 0.0, 2),
        "one-pass/model": (0.0, 0.0, 2),
        "vanilla/model": (0.5, 1.0, 2),
    }
    assert ways["two-stage/ours"]["faults"] == ways["two-stage/model"]["faults"] == {"wrong_value": 1}
    assert ways["one-pass/ours"]["faults"] == {"tl_rejected": 1, "author_failed": 1}
    assert ways["vanilla/model"]["faults"] == {"source_rejected": 1}
    tokens = {name: (way["tokens_in"], way["tokens_out"]) for name, way in ways.items()}
    assert tokens["two-stage/ours"] == (400, 200), "two sketches, two programs"
    assert tokens["two-stage/model"] == (500, 250), "and one translation, of the program that is right"
    assert tokens["one-pass/model"] == tokens["vanilla/model"] == (200, 100)
    assert asked == 9, "what two ways both ask is asked once"
    assert all(way["model_s"] > 0 for way in ways.values()) and ways["two-stage/ours"]["work_s"] == 0.5
    assert count(tmp_path, RecordedClient(store), store) == ways


def test_some_ways_as_a_table_with_repairs(tmp_path):
    faulty_first = iter([CPP.replace("j <= last", "j < last"), CPP])
    with ChatServer(lambda *_: completion(next(faulty_first))) as server:
        ended = ablate(tmp_path, server, "--ways", "vanilla/model", "--samples", "1", "--repairs", "1")
    assert ended.returncode == 0, ended.stderr
    titles, row, *rest = ended.stdout.splitlines()
    assert "pass@1" in titles and row.split()[:5] == ["vanilla", "model", "1/1", "1.00", "1.00"] and "1 wrong_value" in row
    assert any(line.startswith("test-model, answers asked for") for line in rest)
    assert "These figures are of this run's answers and of nothing else." in ended.stdout
    again = ablate(tmp_path, None, "--ways", "vanilla/model", "--samples", "1", "--repairs", "1", "--replay", "--json", key="")
    assert again.returncode == 0, again.stderr
    told = json.loads(again.stdout)
    assert (told["model"], told["answers"], told["samples"], told["k"], told["repairs"]) == ("test-model", "on record", 1, 1, 1)
    [way] = told["ways"]
    assert (way["pass_at_1"], way["samples_right"], way["faults"]) == (1.0, 1, {"wrong_value": 1})


@pytest.mark.parametrize("replay", [False, True])
def test_without_an_answer_nothing_is_said_of_the_model(tmp_path, replay):
    if replay:
        ended = ablate(tmp_path, None, "--replay", "--samples", "2", key="")
    else:
        with ChatServer(lambda *_: failure(401, "no")) as server:
            ended = ablate(tmp_path, server, "--samples", "2")
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert "No answer was judged: nothing is said about test-model." in ended.stdout
    assert "0.00" not in ended.stdout and "0/0" in ended.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ways", "three-stage/ours"], "--ways: expected some of two-stage/ours"),
        (["--samples", "2", "--k", "3"], "--k: expected at most the number of samples, 2, found 3"),
        (["--executor", "cloud"], "--executor: expected ray or local"),
    ],
)
def test_wrong_flags_are_one_line(tmp_path, flags, said):
    ended = ablate(tmp_path, None, "--replay", *flags)
    assert ended.returncode == 2 and said in ended.stderr and "Traceback" not in ended.stderr


def test_pass_at_k_is_the_chance_of_one_right_among_k():
    assert Problem(5, 2).pass_at(1) == pytest.approx(2 / 5)
    assert Problem(5, 2).pass_at(2) == pytest.approx(1 - 3 / 10)
    assert Problem(5, 0).pass_at(5) == 0 and Problem(5, 1).pass_at(5) == 1
    assert Problem(3, 3).pass_at(4) is None, "never from fewer samples than k"
    tally = WayTally(WAYS[0], [Problem(4, 1), Problem(4, 4), Problem(0, 0)])
    assert tally.pass_at(1) == pytest.approx((0.25 + 1) / 2) and WayTally(WAYS[0]).pass_at(1) is None


def test_the_ways_are_those_of_the_paper():
    assert {(way.name, way.translator) for way in WAYS} == {
        ("two-stage", "ours"), ("two-stage", "model"), ("one-pass", "ours"), ("one-pass", "model"), ("vanilla", "model"),
    }  # fmt: skip
