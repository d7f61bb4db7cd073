"""The parts of `make engines`: its judge, traffic and observer work as described. No engine is started here."""

from __future__ import annotations

import json
import struct
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.system.engines import report
from tests.system.engines.concurrent_clients import blocks_for
from tests.system.engines.installation import _without_local_build, unpack_kvevents
from tests.system.engines.judging import Example, Tally
from tests.system.engines.models import FIRST_TOKEN, VOCABULARY, write_adapter, write_model
from tests.system.engines.observer import engine_observer, page
from tests.system.engines.sequential import SequentialResult, scenarios
from tests.system.engines.server import BLOCK_SIZE, MAX_LENGTH
from tests.system.engines.service import Prediction
from tests.system.engines.traffic import Habits, Traffic
from tools.docs_site import with_generated

EXAMPLE = Example(number=0, predicted=32, cached=0, length=70, salt=None, lora=None, trust="EXACT")


def predicted(tokens: int, trust: str = "EXACT", *, is_attested: bool = False) -> Prediction:
    return Prediction(tokens, trust, "", is_attested)


def test_a_prediction_is_wrong_only_if_it_differs_and_was_exact() -> None:
    tally = Tally()
    assert tally.add(predicted(32), 32, EXAMPLE)
    assert tally.add(predicted(32, "DEGRADED"), 0, EXAMPLE)
    assert tally.add(predicted(0, "STALE"), 0, EXAMPLE)
    assert not tally.add(predicted(32, is_attested=True), 0, EXAMPLE)
    assert (tally.requests, tally.exact, tally.wrong, tally.unclaimed, tally.unclaimed_equal) == (4, 1, 1, 2, 1)
    assert (tally.hits, tally.attested) == (1, 1)
    assert tally.trust == {"EXACT": 2, "DEGRADED": 1, "STALE": 1}
    assert tally.examples == [EXAMPLE]


@pytest.mark.parametrize(("publisher", "wrong"), [("vLLM's own", 1), ("kvevents plugin", 2)])
def test_wrong_predictions_fail_the_run_except_after_a_reset_without_the_plugin(publisher: str, wrong: int) -> None:
    wrong_tally = Tally()
    wrong_tally.add(predicted(32), 0, EXAMPLE)
    result = SequentialResult("s", 1, wrong_tally, wrong_tally, [], 1.0)
    found = report.Report("vllm", "now", sequential=[report.Sequential(publisher, 0.0, result)])
    assert report.wrong(found) == wrong
    assert "| 1 right" not in report.text(found)


def test_reports_of_several_runs_can_be_joined(tmp_path: Path) -> None:
    runs = [SequentialResult("s", seed, Tally(), Tally(), [], 1.0) for seed in (1, 2)]
    parts = [report.Report("vllm", "now", sequential=[report.Sequential("p", 0.0, run)]) for run in runs]
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, part in zip(paths, parts, strict=True):
        path.write_bytes(report.encode(part))
    joined = tmp_path / "joined.json"
    assert report.main([*map(str, paths), "--json", str(joined)]) == 0
    assert [each.result.seed for each in report.read(joined).sequential] == [1, 2]
    with pytest.raises(ValueError, match="reports of vllm and of sglang are not joined"):
        report.join([parts[0], report.Report("sglang", "now")])


def test_traffic_is_reproducible_and_has_all_kinds_of_requests() -> None:
    habits = Habits(adapters=(None, "a"), full_reports=0.2)

    def draw_prompts() -> list[object]:
        traffic, prompts = Traffic("1", habits, BLOCK_SIZE), []
        for _ in range(200):
            prompts.append(traffic.next())
            traffic.answered(prompts[-1], [FIRST_TOKEN] * prompts[-1].answer)
        assert all(len(prompt.tokens) + prompt.answer <= MAX_LENGTH for prompt in prompts)
        assert all(FIRST_TOKEN <= token < VOCABULARY for prompt in prompts for token in prompt.tokens)
        assert any(prompt.salt for prompt in prompts)
        assert any(prompt.lora for prompt in prompts)
        assert any(prompt.is_reported_in_full for prompt in prompts)
        assert any(len(prompt.tokens) % BLOCK_SIZE == 0 for prompt in prompts)
        return list(prompts)

    assert draw_prompts() == draw_prompts()


def test_scenarios_kill_and_reset_engines_between_other_requests() -> None:
    for scenario in scenarios(800, 0.25):
        assert scenario.requests == 400
        assert all(0 < at < scenario.requests and at % scenario.reset_every for at in scenario.kills)


def test_concurrent_runs_have_enough_blocks_to_evict_none() -> None:
    assert blocks_for(2000) * BLOCK_SIZE > 2000 * MAX_LENGTH


def test_an_observation_reads_the_page_of_the_observer(tmp_path: Path) -> None:
    for name in ("PUBLISHED", "LAST_TIMESTAMP", "IS_IDLE", "STEPS", "SAMPLES", "SERIES", "HEAD", "PAGE_BYTES"):
        assert getattr(engine_observer, name) == getattr(page, name)
    observation = page.Observation(tmp_path / "page")
    assert observation.progress() == (0, 0.0, False, 0)
    written = engine_observer.Page(str(tmp_path / "page"))
    written.words[page.PUBLISHED] += 3
    written.doubles[page.LAST_TIMESTAMP] = 1795654965.25
    written.words[page.IS_IDLE] = 1
    for value in range(page.SAMPLES + 10):
        written.add_sample(2, value)
    assert observation.progress() == (3, 1795654965.25, True, 0)
    assert observation.samples("step_ns", skip=page.SAMPLES + 8) == [page.SAMPLES + 8, page.SAMPLES + 9]
    assert observation.samples("step_ns") == list(range(10, page.SAMPLES + 10))
    assert observation.samples("publish_ns") == []


def test_models_and_adapters_have_the_files_that_engines_read(tmp_path: Path) -> None:
    hybrid = write_model(tmp_path / "hybrid", "hybrid")
    assert json.loads((hybrid / "config.json").read_text())["layer_types"].count("sliding_attention") == 2
    assert len(json.loads((hybrid / "tokenizer.json").read_text())["model"]["vocab"]) == VOCABULARY
    weights = (write_adapter(tmp_path / "adapter", 1) / "adapter_model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", weights)
    header = json.loads(weights[8 : 8 + length])
    assert max(tensor["data_offsets"][1] for tensor in header.values()) == len(weights) - 8 - length


def test_an_unpacked_wheel_is_a_distribution_with_its_entry_points(tmp_path: Path) -> None:
    wheel = tmp_path / "kvevents-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("kvevents/__init__.py", "")
        archive.writestr("kvevents-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: kvevents\nVersion: 1.0\n")
        archive.writestr("kvevents-1.0.dist-info/entry_points.txt", "[vllm.general_plugins]\nkvevents = kvevents:register\n")
    (found,) = metadata.distributions(path=[str(unpack_kvevents(wheel, tmp_path / "whole"))])
    assert [(point.group, point.value) for point in found.entry_points] == [("vllm.general_plugins", "kvevents:register")]
    without_plugin = unpack_kvevents(wheel, tmp_path / "without-plugin", with_plugin=False)
    (found,) = metadata.distributions(path=[str(without_plugin)])
    assert list(found.entry_points) == []
    assert (without_plugin / "kvevents" / "__init__.py").exists()
    without_package = unpack_kvevents(wheel, tmp_path / "without-package", with_package=False)
    assert not (without_package / "kvevents").exists()


def test_only_the_local_version_of_a_requirement_is_removed() -> None:
    assert (
        _without_local_build('torch==2.13.0+cpu; platform_machine == "x86_64"') == 'torch==2.13.0; platform_machine == "x86_64"'
    )
    assert _without_local_build("torchvision; extra") == "torchvision; extra"


def test_the_documents_quote_the_report() -> None:
    """`docs/developers/testing.md` has the tables of `results.json` without durations; no prediction in it was wrong."""
    found = report.read(report.RESULTS)
    document = Path(__file__).parents[2] / "docs" / "developers" / "testing.md"
    assert report.text(found, timings=False) in with_generated(document.read_text(encoding="utf-8"))
    assert report.wrong(found) == 0
