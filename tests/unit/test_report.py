"""The report page of made-up run directories: every number below is test data and was never measured."""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwright.checkpoint import step_directories
from shardwright.checkpoint.writing import CheckpointWriter
from shardwright.errors import UserError
from shardwright.rectangle import Rectangle
from shardwright.report import compare, render
from shardwright.spec import files
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.plan import Plan, Stage, single_rank_plan
from shardwright.spec.timeline import Event, Timeline
from shardwright.spec.workload import Block, Feature, FeatureStatistics, Table, Workload

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
STAGES = {"read": ("read", 4e-3), "lookup": ("main", 3e-3), "dense": ("main", 9e-3), "update": ("main", 5e-3)}
HOSTILE_TEXT = "<script>alert('x')</script>"


def made_up_workload() -> Workload:
    return Workload(
        version=1,
        batch_size=1024,
        tables=(Table("items", 1_000_000, 16), Table("users", 50_000, 8)),
        features=(Feature("item", "items"), Feature("item_history", "items"), Feature("user", "users")),
        statistics=(FeatureStatistics("item", 1.0, 0.5), FeatureStatistics("item_history", 9.5, 0.25)),
        optimizer=RowWiseAdaGrad(lr=0.05),
        blocks=(
            Block("bottom", 2_500, 10_000, 5_120_000, 10_240_000, 262_144),
            Block("top", 900, 3_600, 1, 2, 3),
        ),
    )


def made_up_timeline(steps: int = 5) -> Timeline:
    events = []
    clock = 0.0
    for step in range(steps):
        for name, (lane, seconds) in STAGES.items():
            duration = seconds * (1 + 0.1 * math.sin(step + len(name)))
            event = Event(
                id=len(events),
                name=name,
                kind="stage",
                rank=0,
                lane=lane,
                step=step,
                start=clock,
                end=clock + duration,
            )
            events.append(event)
            clock += duration
    return Timeline("measured", tuple(events))


def train_lines(num: int = 30) -> list[dict[str, object]]:
    return [
        {
            "kind": "train",
            "step": 20 * i,
            "samples": 20_480 * i,
            "loss": 0.35 + 0.25 * math.exp(-i / 6) + 0.004 * math.sin(7 * i),
            "ne": 0.80 + 0.3 * math.exp(-i / 6) + 0.008 * math.sin(7 * i),
            "auc": 0.78 - 0.2 * math.exp(-i / 8) + 0.004 * math.sin(5 * i),
            "calibration": 1 + 0.2 * math.exp(-i / 3) * math.cos(i) + 0.01 * math.sin(3 * i),
            "samples_per_second": 51_234.0 + 900 * math.sin(2 * i),
            "seconds": 0.4 * i,
        }
        for i in range(1, num + 1)
    ]


def eval_lines(num: int = 6) -> list[dict[str, object]]:
    return [
        {
            "kind": "eval",
            "step": 100 * i,
            "samples": 102_400 * i,
            "loss": 0.352 + 0.2 * math.exp(-i),
            "ne": 0.8123 + 0.2 * math.exp(-i),
            "auc": 0.7777 - 0.1 * math.exp(-i),
            "calibration": 1.002 + 0.05 * math.exp(-i),
            "bound_ne": 0.7701 + 0.0004 * math.sin(i),
        }
        for i in range(1, num + 1)
    ]


END_LINE = {"kind": "end", "step": 600, "samples": 614_400, "seconds": 83.0, "samples_per_second": 50_999.6}
END_LINE["peak_rss_bytes"] = 1_610_612_736


def write_metrics(run: Path, lines: list[dict[str, object]], *, tail: str = "") -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)


@pytest.fixture
def empty_run(tmp_path: Path) -> Path:
    """A run killed before its first step."""
    run = tmp_path / "test-data-001"
    run.mkdir()
    (run / "config.toml").write_text('recipe = "made-up"\nseed = 1\n\n[train]\nbatch_size = 1024\nlrs = [0.1, 0.2]\n')
    return run


@pytest.fixture
def full_run(empty_run: Path) -> Path:
    """A run with all files that a page shows."""
    environment = {
        "started": "2001-02-03T04:05:06+00:00",
        "processor": "Test Data CPU",
        "cores": 2,
        "device": "cpu",
    }
    environment["command"] = f"shardwright train {HOSTILE_TEXT}"
    (empty_run / "environment.json").write_text(json.dumps(environment))
    workload = made_up_workload()
    stages = tuple(Stage(name, lane) for name, (lane, _) in STAGES.items())
    files.write(workload, empty_run / "workload.json")
    files.write(single_rank_plan(workload, stages=stages, lanes=("read", "main")), empty_run / "plan.json")
    (empty_run / "trace.json").write_text(made_up_timeline().to_chrome())
    write_metrics(empty_run, [*train_lines(), *eval_lines(), END_LINE])
    return empty_run


def text_of(run: Path) -> str:
    """The page without plotly's source."""
    return re.sub(r"<script>.*?</script>", "", render(run).read_text(), count=1, flags=re.S)


def figures_of(run: Path) -> dict[str, dict[str, list[dict[str, object]]]]:
    match = re.search(r'<script type="application/json" id="figures">(.*?)</script>', render(run).read_text(), re.S)
    assert match
    return json.loads(match[1])


def test_a_full_run_shows_its_figures_tables_and_reasons(full_run: Path):
    page = text_of(full_run)
    for words in (
        "<h1>test-data-001</h1>",
        "made-up",
        "2001-02-03",
        "Test Data CPU",
        "true probabilities",
        "51,000",
        "1 min 23 s",
        "1.5 GiB",
        "1,000,000",
        "61 MiB",
        "item, item_history",
        "10.5",
        "5.12 M",
        "table items",
        "one process holds the whole table",
        "train.batch_size",
        "[0.1, 0.2]",
    ):
        assert words in page, words
    assert f"{eval_lines()[-1]['ne']:.4f}" in page
    assert "has not ended" not in page
    assert list(figures_of(full_run)) == ["ne", "auc", "calibration", "loss", "samples_per_second", "stages", "gantt"]


def test_ids_per_sample_need_statistics_of_all_features(full_run: Path):
    row = re.search(r"<td>users</td>.*", text_of(full_run))
    assert row and "not measured" in row[0]


def test_the_bound_is_drawn_as_a_dashed_line(full_run: Path):
    ne = figures_of(full_run)["ne"]["data"]
    assert [trace["name"] for trace in ne] == ["train window", "evaluation", "best reachable"]
    assert ne[2]["line"]["dash"] == "dash"  # type: ignore[index]
    assert ne[2]["y"] == [line["bound_ne"] for line in eval_lines()]


def test_stages_are_means_over_steps_with_the_longest_on_top(full_run: Path):
    (bars,) = figures_of(full_run)["stages"]["data"]
    assert bars["y"] == ["lookup", "read", "update", "dense"]
    dense = [event.end - event.start for event in made_up_timeline().events if event.name == "dense"]
    assert bars["x"][-1] == pytest.approx(1e3 * sum(dense) / len(dense))  # type: ignore[index]


def test_a_stage_that_runs_in_parts_counts_once_per_step_without_its_body(full_run: Path):
    part = Event(id=0, name="dense", kind="stage", rank=0, lane="main", step=0, start=0.0, end=0.002)
    parts = [replace(part, id=i, micro=i, start=0.003 * i, end=0.003 * i + 0.002) for i in range(4)]
    body = replace(part, id=9, name="all_reduce", kind="communication")
    (full_run / "trace.json").write_text(Timeline("measured", (*parts, body)).to_chrome())
    (bars,) = figures_of(full_run)["stages"]["data"]
    assert bars["y"] == ["dense"]
    assert bars["x"] == pytest.approx([8.0])
    assert "The only measured step took 11 ms." in text_of(full_run)


def test_the_step_and_its_parts_are_means(full_run: Path):
    """One step is 40 times as long: median and mean differ, and the page must not mix them."""
    events: list[Event] = []
    clock = 0.0
    for step in range(11):
        for name, seconds in (("lookup", 2e-3), ("dense", 3e-3)):
            duration = seconds * (40 if step == 10 else 1)
            event = Event(
                id=len(events), name=name, kind="stage", rank=0, lane="main", step=step, start=clock, end=clock
            )
            events.append(replace(event, end=clock + duration))
            clock += duration
        clock += 1e-3  # between steps, covered by no event
    (full_run / "trace.json").write_text(Timeline("measured", tuple(events)).to_chrome())
    page = text_of(full_run)
    assert "A step took 22.7 ms, the mean of 11 measured steps" in page and "their median is 5 ms" in page
    total = re.search(r"<tfoot><tr><td>the step</td>(.*?)</tr>", page)
    assert total and total[1].count("22.7 ms") == 2
    assert not re.search(r"\de-\d", re.sub(r"<style>.*?</style>", "", page, flags=re.S).partition("<script")[0])


def test_untraced_time_of_overlapped_steps_has_a_row(full_run: Path):
    events: list[Event] = []

    def add(name: str, kind: str, step: int, start: float, end: float) -> None:
        lane = "ids" if kind == "flight" else "main"
        event = Event(id=len(events), name=name, kind=kind, rank=0, lane=lane, step=step, start=start, end=end)
        events.append(event)

    for step in range(6):
        add("dense", "stage", step, 0.01 * step, 0.01 * step + 0.008)
        add("ids", "flight", step + 1, 0.01 * step + 0.002, 0.01 * step + 0.005)
    (full_run / "trace.json").write_text(Timeline("measured", tuple(events)).to_chrome())
    page = text_of(full_run)
    assert "A step took 10 ms" in page
    assert re.search(r"<td>not traced</td><td[^>]*></td><td[^>]*>2 ms</td>", page)


def test_windows_with_stolen_or_throttled_processor_are_marked(full_run: Path):
    assert figures_of(full_run)["samples_per_second"]["layout"].get("shapes") is None
    assert "taken away" not in text_of(full_run)
    quiet = {"stolen_share": 0.01, "throttled_share": 0.0, "load": 2.1, "expected_load": 2.0}
    windows = [quiet | {"step": 20 * i, "before": 20_480 * (i - 1), "samples": 20_480 * i} for i in range(1, 31)]
    windows[3] |= {"stolen_share": 0.43}
    windows[7] |= {"throttled_share": 0.5}
    windows[8] |= {"load": 9.3}
    lines = "".join(json.dumps(line) + "\n" for line in windows)
    (full_run / "machine.jsonl").write_text(lines + '{"step": 6')
    page = text_of(full_run)
    assert "In 3 of 30 training windows the processor was taken away from this run" in page
    figure = figures_of(full_run)["samples_per_second"]
    shades = [(shape["x0"], shape["x1"]) for shape in figure["layout"]["shapes"]]
    assert shades == [(61_440, 81_920), (143_360, 163_840), (163_840, 184_320)]
    (mark,) = [trace for trace in figure["data"] if trace["name"] == "processor taken away"]
    assert mark["text"] == [
        "43% stolen by other virtual machines",
        "throttled by its cgroup for 50% of the time",
        "load average 9.3 where 2 are expected",
    ]
    assert mark["y"][0] == train_lines()[3]["samples_per_second"]
    (full_run / "machine.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"machine\.jsonl, line 1: before is None; wanted a number"):
        render(full_run)


def test_checkpoints_are_listed_with_their_cost(full_run: Path):
    assert "This run has no complete checkpoint." in text_of(full_run)
    writer, tensor = CheckpointWriter(full_run / "checkpoint"), torch.zeros(40, 8)
    for step, base in ((10, None), (20, step_directories.checkpoint_path(full_run / "checkpoint", 10))):
        writer.prepare(step)
        row_mask = torch.arange(40) < 4
        writer.begin(step, [Rectangle("model.t", (40, 8), tensor, (0, 40), (), row_mask)], {}, base)
        assert writer.wait() == ""
    page = text_of(full_run)
    assert "step-00000020" in page and "training waited" in page and page.count("step-00000010") == 2
    (full_run / "checkpoint/step-00000010/manifest.json").write_text("{}")
    assert "damaged" in text_of(full_run)


def test_the_gantt_draws_the_last_steps_from_zero(full_run: Path):
    bars = {trace["name"]: trace for trace in figures_of(full_run)["gantt"]["data"]}
    assert list(bars) == list(STAGES)
    assert [len(trace["base"]) for trace in bars.values()] == [3, 3, 3, 3]  # type: ignore[arg-type]
    assert bars["read"]["base"][0] == 0  # type: ignore[index]
    assert "step 2, rank 0, lane read" in bars["read"]["hovertext"][0]  # type: ignore[index]


def test_the_page_says_which_ranks_are_drawn(full_run: Path):
    events = [
        Event(id=rank, name="dense", kind="stage", rank=rank, lane="main", step=0, start=0.0, end=1.0)
        for rank in range(6)
    ]
    (full_run / "trace.json").write_text(Timeline("emulated", tuple(events)).to_chrome())
    assert "Ranks 0 to 3 of 6 are drawn." in text_of(full_run)
    assert figures_of(full_run)["gantt"]["data"][0]["y"] == ["0 main", "1 main", "2 main", "3 main"]


def test_text_from_files_is_escaped_in_page_and_figures(full_run: Path):
    (full_run / "config.toml").write_text(f'recipe = "{HOSTILE_TEXT}"\n')
    event = replace(made_up_timeline().events[0], name=HOSTILE_TEXT, lane=HOSTILE_TEXT)
    (full_run / "trace.json").write_text(Timeline("measured", (event,)).to_chrome())
    page = render(full_run).read_text()
    assert HOSTILE_TEXT not in page
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in page
    assert "&lt;script" in str(figures_of(full_run)["stages"]["data"][0]["y"])


def test_the_page_is_one_file_with_plotly_once_and_no_address_to_load_from(full_run: Path):
    page = render(full_run).read_text()
    assert page.count("* plotly.js v") == 1
    assert "default-src 'none'" in page
    outside = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"\b(src|href)=|@import|url\(", outside)


def test_an_empty_run_says_what_is_missing(empty_run: Path):
    page = text_of(empty_run)
    for sentence in (
        "This run has written no metrics yet.",
        "There are no curves",
        "There is no trace of this run",
        "There is no workload.json",
        "There is no plan.json",
        "There is no environment.json",
    ):
        assert sentence in page, sentence
    assert figures_of(empty_run) == {}


def test_a_language_model_has_only_a_loss(full_run: Path):
    keys = ("kind", "step", "samples", "loss", "samples_per_second")
    lines = (*train_lines(), *eval_lines())
    write_metrics(full_run, [{key: line[key] for key in keys if key in line} for line in lines])
    files.write(replace(made_up_workload(), tables=(), features=(), statistics=()), full_run / "workload.json")
    files.write(replace(files.read(Plan, full_run / "plan.json"), tables=()), full_run / "plan.json")
    page = text_of(full_run)
    assert "Not measured in this run: normalized entropy, AUC, calibration." in page
    assert "This model has no embedding tables." in page
    assert "<dt>AUC</dt>" not in page
    assert "Log loss" not in page
    assert list(figures_of(full_run)) == ["loss", "samples_per_second", "stages", "gantt"]


def test_a_killed_run_without_evaluation_and_with_an_incomplete_line(full_run: Path):
    write_metrics(full_run, train_lines(4), tail='{"kind": "train", "st')
    page = text_of(full_run)
    assert "has not ended, or was killed: its last record is of step 80." in page
    assert "is incomplete, as after a kill" in page
    assert "No evaluation has run" in page
    assert f"last training window: {train_lines(4)[-1]['ne']:.4f}" in page
    assert "median of 4 training windows" in page


def test_a_last_line_without_its_newline_counts(full_run: Path):
    write_metrics(full_run, train_lines(), tail=json.dumps(END_LINE))
    page = text_of(full_run)
    assert "1 min 23 s" in page
    assert "cut off" not in page


def test_values_that_are_not_finite_are_gaps(full_run: Path):
    write_metrics(full_run, [train_lines()[0] | {"loss": math.nan, "auc": None}, *eval_lines()[:1]])
    assert figures_of(full_run)["loss"]["data"][0]["y"] == [None]
    assert [trace["name"] for trace in figures_of(full_run)["auc"]["data"]] == ["evaluation"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "tr', "bad JSON"),
        ("", "bad JSON"),
        ("[1]", "got a list"),
        ('{"kind": "trian", "step": 1, "samples": 2}', "kind is 'trian'; allowed: train, progressive, eval, test, end"),
        ('{"kind": "train", "step": "1", "samples": 2}', "step is '1'"),
        ('{"kind": "train", "step": 1}', "samples is None"),
        ('{"kind": "train", "step": 1, "samples": 2, "loss": "low"}', "loss is 'low'"),
    ],
)
def test_errors_name_the_number_of_a_broken_line(full_run: Path, line: str, message: str):
    lines = [json.dumps(line) for line in train_lines(2)]
    (full_run / "metrics.jsonl").write_text("\n".join([lines[0], line, lines[1], ""]))
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: ") as error:
        render(full_run)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["config.toml", "environment.json", "workload.json", "plan.json", "trace.json"])
def test_errors_name_a_broken_file_and_the_old_report_stays(full_run: Path, name: str):
    before = render(full_run).read_bytes()
    (full_run / name).write_text("{ broken")
    with pytest.raises(UserError, match=re.escape(name)) as error:
        render(full_run)
    assert "\n" not in str(error.value)
    assert (full_run / "report.html").read_bytes() == before
    assert not [path for path in full_run.iterdir() if "tmp" in path.name]


def test_a_failure_while_writing_leaves_the_old_report(full_run: Path, monkeypatch: pytest.MonkeyPatch):
    before = render(full_run).read_bytes()
    write_metrics(full_run, train_lines(3))

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(UserError, match=r"report\.html.*No space left"):
        render(full_run)
    assert (full_run / "report.html").read_bytes() == before
    assert not [path for path in full_run.iterdir() if "tmp" in path.name]


@pytest.mark.parametrize("name", ["nothing-here", "."])
def test_other_directories_are_refused(tmp_path: Path, name: str):
    with pytest.raises(UserError, match="not a run directory"):
        render(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_output_to_another_path(full_run: Path, tmp_path: Path):
    assert render(full_run, output=tmp_path / "page.html") == tmp_path / "page.html"
    assert not (full_run / "report.html").exists()
    with pytest.raises(UserError, match="no-such-place"):
        render(full_run, output=tmp_path / "no-such-place" / "page.html")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine to open the page in")
@pytest.mark.parametrize("fixture", ["full_run", "empty_run"])
def test_the_page_runs_in_a_browser_without_an_error(fixture: str, request: pytest.FixtureRequest, tmp_path: Path):
    run: Path = request.getfixturevalue(fixture)
    assert_runs(render(run), len(figures_of(run)), tmp_path)


def assert_runs(page: Path, num_figures: int, tmp_path: Path) -> None:
    """Check in headless Chromium that every figure is drawn and that nothing is on the console."""
    switches = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    )
    quiet = ("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr")
    arguments = (
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=4000",
        "--dump-dom",
        page.as_uri(),
    )
    result = subprocess.run(
        [str(CHROMIUM), *switches, *quiet, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.count('class="main-svg"') >= num_figures
    assert len(re.findall(r'class="plot js-plotly-plot"', result.stdout)) == num_figures
    errors = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    assert errors == []


@pytest.fixture
def two_runs(full_run: Path) -> list[Path]:
    """Two runs with different settings; the second was killed before any evaluation."""
    other = full_run.parent / "test-data-002"
    shutil.copytree(full_run, other)
    config = (other / "config.toml").read_text()
    (other / "config.toml").write_text(config.replace("batch_size = ", "batch_size = 9"))
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    train_only = [line for line in lines if line["kind"] == "train"]
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in train_only))
    return [full_run, other]


def test_progressive_and_grouped_figures_are_drawn_where_measured(full_run: Path):
    lines = [json.loads(line) for line in (full_run / "metrics.jsonl").read_text().splitlines()]
    progressive = {"kind": "progressive", "step": 20, "samples": 20_480, "ne": 0.95, "auc": 0.6}
    grouped = [line | {"grouped_auc": 0.7} if line["kind"] == "eval" else line for line in lines]
    write_metrics(full_run, [*grouped[:-1], progressive, grouped[-1]])
    figures = figures_of(full_run)
    assert "progressive, whole run" in [trace["name"] for trace in figures["ne"]["data"]]
    assert [trace["name"] for trace in figures["grouped_auc"]["data"]] == ["evaluation"]


def test_a_comparison_shows_last_values_curves_and_differences(two_runs: list[Path]):
    path = compare.render(two_runs)
    assert path == two_runs[0].parent / "compare.html"
    text = path.read_text()
    head = text.partition('<script type="application/json"')[0]
    for words in ("test-data-001", "test-data-002 has not ended", "train.batch_size", "51,000", "not measured"):
        assert words in head, words
    assert f"{eval_lines()[-1]['ne']:.4f}" in head and "model.kind" not in head
    match = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.S)
    assert match
    figures = json.loads(match[1])
    assert [trace["name"] for trace in figures["ne"]["data"]] == ["test-data-001", "test-data-002"]
    assert len(figures["ne"]["data"][0]["x"]) == len(eval_lines())
    assert len(figures["ne"]["data"][1]["x"]) == len(train_lines())


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine to open the page in")
def test_a_comparison_runs_in_a_browser_without_an_error(two_runs: list[Path], tmp_path: Path):
    assert_runs(compare.render(two_runs), 5, tmp_path)


def task_lines() -> list[dict]:
    """Evaluations and training windows of a model with the tasks "click" and "buy"."""
    tasks = {"click.ne": 0.8, "click.auc": 0.7, "click.calibration": 1.1, "buy.ne": 0.61, "buy.auc": 0.83}
    kinds = ("train", "eval", "train", "eval")
    return [
        {"kind": kind, "step": 10 * n, "samples": 1000 * n, "loss": 1 / n, **{k: v / n**0.1 for k, v in tasks.items()}}
        for n, kind in enumerate(kinds, start=1)
    ]


def test_a_comparison_shows_each_task(two_runs: list[Path]):
    """The first run has one task, the second and third have two."""
    third = two_runs[0].parent / "test-data-003"
    shutil.copytree(two_runs[1], third)
    for run in (two_runs[1], third):
        write_metrics(run, task_lines())
    text = compare.render([*two_runs, third]).read_text()
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr>.*?</tr>", text, re.S)]
    outcome = [row for row in rows if row and row[0].startswith("test-data")]
    names = [("001", ""), ("002", "click"), ("003", "click"), ("002", "buy"), ("003", "buy")]
    assert [tuple(row[:2]) for row in outcome] == [(f"test-data-{run}", task) for run, task in names]
    assert outcome[1][3] == f"{0.8 / 4**0.1:.4f}" and outcome[3][4] == f"{0.83 / 4**0.1:.4f}"
    match = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.S)
    assert match
    figures = json.loads(match[1])
    assert [trace["name"] for trace in figures["buy-auc"]["data"]] == ["test-data-002", "test-data-003"]
    assert figures["click-ne"]["data"][0]["x"] == [2000, 4000] and "click-calibration" in figures
    assert [trace["name"] for trace in figures["ne"]["data"]] == ["test-data-001"]
    assert figures["ne"]["layout"]["showlegend"], "the only curve has its run's name"
    assert len(figures["loss"]["data"]) == 3 and "buy-calibration" not in figures
