"""The lock on a folder: real processes hold it, are killed or stopped, and take it over."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cases import cases
from tests.helpers.data import rejection
from tests.helpers.launches import wait_until
from tests.helpers.lock_holder import open_lock
from titanlite import config
from titanlite.config.loader import ConfigError
from titanlite.launch import folder_lock, run_folders
from titanlite.launch.run_folders import check_writable, folders_of_run, lock_run

ROOT = Path(__file__).parents[2]
ELSEWHERE = "another machine"


@contextlib.contextmanager
def process(folder: Path, *arguments: str, waits: bool = True) -> Iterator[subprocess.Popen[str]]:
    """Start a process that locks the folder, and by default wait until it has; kill it after the body."""
    command = [sys.executable, "-u", "-m", "tests.helpers.lock_holder", str(folder), *arguments]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        if waits:
            assert started.stdout.readline() == "locked\n"
        yield started
    finally:
        started.kill()
        started.communicate(timeout=10)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def dead_lock(folder: Path, machine: str = ELSEWHERE) -> Path:
    """Leave the lock of a process that was killed."""
    with process(folder, machine):
        pass
    return folder / "run.lock"


def test_a_folder_has_one_holder_at_a_time(tmp_path):
    with process(tmp_path) as other:
        line = rejection(open_lock(tmp_path).acquire)
        assert line.startswith(f"the folder: in use by process {other.pid} on node ")
        assert line.endswith(f" (lock {tmp_path}/run.lock); wait")
        other.send_signal(signal.SIGSTOP)
        time.sleep(0.3)  # more than its patience: on its own node, a stopped process is alive
        assert "in use by" in rejection(open_lock(tmp_path).acquire)
    with open_lock(tmp_path) as lock:
        assert "in use by" in rejection(open_lock(tmp_path).acquire)
        assert lock.is_held()
    assert names(tmp_path) == []


def test_a_dead_process_of_this_node_is_taken_over_at_once(tmp_path, capsys):
    with process(tmp_path) as other:
        pass
    begin = time.monotonic()
    with open_lock(tmp_path, take_over=False, beat_seconds=60):
        assert time.monotonic() - begin < 1
        assert names(tmp_path) == ["run.lock"]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"the folder: took over the lock of process {other.pid} on node ")
    assert line.endswith(", which is dead")


def test_a_process_that_has_the_id_of_the_dead_one_is_not_taken_for_it(tmp_path):
    with open_lock(tmp_path, beat_seconds=60) as lock:
        content = json.loads(lock.path.read_text())
        assert content["pid"] == os.getpid()
        lock.path.write_text(json.dumps({**content, "start_time": "1", "token": "other"}))
        with open_lock(tmp_path, beat_seconds=60):
            assert not lock.is_held()


def test_a_process_that_has_ended_but_has_not_been_waited_for_is_dead(tmp_path):
    with process(tmp_path) as other:
        assert folder_lock.process_start_time(other.pid)
        other.kill()
        while folder_lock.process_start_time(other.pid):
            time.sleep(0.001)
        assert Path(f"/proc/{other.pid}").exists() or sys.platform != "linux"
        with open_lock(tmp_path):
            pass


def test_a_process_of_another_node_is_alive_while_its_heartbeat_is(tmp_path, capsys):
    with process(tmp_path, ELSEWHERE) as other:
        assert f"in use by process {other.pid}" in rejection(open_lock(tmp_path, patience=200).acquire)
    begin = time.monotonic()
    with open_lock(tmp_path):
        assert 0.2 <= time.monotonic() - begin < 2
        assert names(tmp_path) == ["run.lock"]
    assert "whose heartbeat has stopped for 0.2 s" in capsys.readouterr().out


def test_a_dead_process_of_another_node_may_be_left_to_the_user(tmp_path):
    lock = dead_lock(tmp_path)
    line = rejection(open_lock(tmp_path, take_over=False).acquire)
    assert "whose heartbeat has stopped" in line
    assert line.endswith(f"; if it is dead, set job.take_over_lock = true, or remove {lock}")
    assert names(tmp_path) == ["run.lock"]


def test_a_process_that_was_suspended_while_another_took_over_notices(tmp_path):
    with process(tmp_path, ELSEWHERE) as suspended:
        suspended.send_signal(signal.SIGSTOP)
        with open_lock(tmp_path) as lock:
            suspended.send_signal(signal.SIGCONT)
            line = suspended.stdout.readline()
            assert line.startswith(f"lost: the folder: the lock {lock.path} was taken over by process {os.getpid()} ")
            suspended.send_signal(signal.SIGINT)  # ends its body: it releases what it no longer has
            suspended.wait(10)
            assert lock.is_held()


def test_of_many_that_take_over_one_succeeds(tmp_path):
    for _ in range(3):
        (tmp_path / "run.lock").write_text("")
        locks = [open_lock(tmp_path) for _ in range(8)]
        results: list[str] = []

        def take(lock: folder_lock.FolderLock, results: list[str] = results) -> None:
            try:
                lock.acquire()
                results.append("taken")
            except ConfigError as error:
                results.append(str(error))

        threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
        for each in threads:
            each.start()
        for each in threads:
            each.join(10)
        assert results.count("taken") == 1, results
        assert sum("in use by" in result for result in results) == 7, results
        assert sum(lock.is_held() for lock in locks) == 1
        for lock in locks:
            lock.release()
    assert names(tmp_path) == []


def test_of_two_processes_that_take_over_one_succeeds(tmp_path):
    dead_lock(tmp_path)
    with process(tmp_path, waits=False) as first, process(tmp_path, waits=False) as second:
        outputs = [each.stdout.readline() + each.stdout.readline() for each in (first, second)]
        assert sorted(output.endswith("locked\n") for output in outputs) == [False, True]
        assert {first.poll(), second.poll()} <= {None, 2}


def test_a_new_lock_is_not_removed_in_place_of_the_dead_one(tmp_path):
    """One process found a dead lock; before it removes that, another process takes it over."""
    found = dead_lock(tmp_path).read_bytes()
    with open_lock(tmp_path) as lock:
        late = open_lock(tmp_path)
        late.token = "late"
        late._withdraw(found)
        assert lock.is_held()
        assert names(tmp_path) == ["run.lock"]


def test_a_lock_that_is_taken_away_while_it_is_taken_is_noticed(tmp_path, monkeypatch):
    """One process renames the new lock in place of the dead one, and a third one takes the gap."""
    late, third = open_lock(tmp_path), open_lock(tmp_path)
    sleep = time.sleep

    def take_away(seconds: float) -> None:
        monkeypatch.setattr(time, "sleep", sleep)
        late.path.unlink()
        third.acquire()

    monkeypatch.setattr(time, "sleep", take_away)
    assert "in use by" in rejection(late.acquire)
    assert third.is_held()
    third.release()


def test_a_damaged_lock_is_taken_over_if_nobody_changes_it(tmp_path, capsys):
    for content in (b"", b"\0" * 500, b"not JSON", b"[]", b'{"beat": 1}', b"\xff" * 9000):
        (tmp_path / "run.lock").write_bytes(content)
        assert "an unknown process" in rejection(open_lock(tmp_path, take_over=False, patience=1).acquire)
        with open_lock(tmp_path, patience=1):
            pass
        assert "took over the lock of an unknown process (the lock is damaged)" in capsys.readouterr().out


def test_hostile_text_in_a_lock_stays_on_one_line(tmp_path):
    content = {"beat": "0" * 12, "node": "a\n\x1b[2Jb", "machine": "m", "pid": 1, "start_time": "1", "since": "\r"}
    (tmp_path / "run.lock").write_text(json.dumps({**content, "token": "t"}))
    line = rejection(open_lock(tmp_path, take_over=False).acquire)
    assert line.isprintable()


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_what_is_no_file_is_no_lock(tmp_path, kind):
    path = tmp_path / "run.lock"
    make = {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("/dev/zero")}
    make[kind]()
    line = rejection(open_lock(tmp_path).acquire)
    assert line.startswith(f"{path}: ")
    assert line.endswith("; remove it")


def test_a_missing_or_damaged_lock_is_restored_by_its_holder(tmp_path):
    with open_lock(tmp_path) as lock:
        for damage in (lock.path.unlink, lambda: lock.path.write_text("damaged")):
            damage()
            wait_until(lock.is_held, "the lock is restored", seconds=5)


def test_a_heartbeat_that_cannot_be_written_is_no_loss(tmp_path, monkeypatch):
    """On a full disk the file keeps its content: a heartbeat overwrites digits that are there."""
    lost: list[str] = []
    with open_lock(tmp_path, lost=lost.append) as lock:
        size, before = lock.path.stat().st_size, beat_after(lock, 0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", no_space)
            time.sleep(0.1)
            assert lock.is_held()
        beat_after(lock, before + 1)  # one may have been in flight
        assert lock.path.stat().st_size == size
    assert lost == []


def beat_after(lock: folder_lock.FolderLock, count: int) -> int:
    """Wait until the counter is above this, and return it."""

    def beat() -> int:
        return int(json.loads(lock.path.read_text())["beat"])

    wait_until(lambda: beat() > count, f"more than {count} heartbeats", seconds=10)
    return beat()


def no_space(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


def run_of(dump_folder: Path, **options: str) -> tuple[dict[str, Path], config.schema.Job]:
    """Return the folders of a run, whose options `section__key` are these."""
    sections: dict[str, dict[str, Any]] = {"profiling": {"enable_profiling": True, "enable_memory_snapshot": True}}
    sections |= {"checkpoint": {"enable": True}, "metrics": {}, "job": {"dump_folder": str(dump_folder)}}
    for name, value in options.items():
        section, _, key = name.partition("__")
        sections[section][key] = value
    each = config.schema.Config.model_validate(sections)
    return folders_of_run(each.job, each.checkpoint, each.metrics, each.profiling), each.job


SHARED = {
    "checkpoint__folder": ("checkpoint.folder", "checkpoint"),
    "metrics__save_tb_folder": ("metrics.save_tb_folder", "tb"),
    "profiling__save_traces_folder": ("profiling.save_traces_folder", "profile_traces"),
    "profiling__save_memory_snapshot_folder": ("profiling.save_memory_snapshot_folder", "memory_snapshot"),
}


@pytest.fixture
def at_exit(monkeypatch):
    """What runs do when their processes end, which is done here."""
    calls: list[Any] = []
    monkeypatch.setattr(run_folders, "at_exit", calls)
    yield calls
    for call in calls:
        call()


@cases(
    ("option", "relative", "second_is_inside"),
    itertools.product(SHARED, [True, False], [True, False]),
    always=zip(SHARED, [True, False, False, True], [False, True, False, True], strict=True),
)
def test_two_runs_do_not_share_any_folder(tmp_path, at_exit, option, relative, second_is_inside):
    """The folder is in the dump folder of one of them, or in neither."""
    name, usual = SHARED[option]
    shared = tmp_path / "b" / usual if second_is_inside else tmp_path / "shared"
    first = run_of(tmp_path / "a", **{option: f"../{shared.relative_to(tmp_path)}" if relative else str(shared)})
    second = run_of(tmp_path / "b", **({} if second_is_inside else {option: str(shared)}))
    for one, other in ((first, second), (second, first)):
        lock_run(*one, lost=print)
        line = rejection(lambda other=other: lock_run(*other, lost=print))
        assert line.startswith(f'{name} = "{other[0][name]}": in use by process {os.getpid()} on node ')
        assert line.endswith(f"; wait for that run or stop it, or choose another {name}")
        while at_exit:
            at_exit.pop()()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_with_two_options_is_locked_once(tmp_path, at_exit):
    folders, job = run_of(tmp_path, checkpoint__folder="", metrics__save_tb_folder=".")
    lock_run(folders, job, lost=print)
    assert len(at_exit) == 3
    assert rejection(lambda: lock_run(folders, job, lost=print)).startswith("job.dump_folder = ")


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.toml"])
@pytest.mark.parametrize("create", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/nowhere/file")])
def test_what_is_no_file_of_a_run_is_rejected(tmp_path, name, create):
    create(tmp_path / name)
    line = rejection(lambda: check_writable(run_of(tmp_path)[0]))
    assert line == f"{tmp_path}/{name}: expected a regular file, or none; move or remove this"


def test_folders_that_cannot_be_written_are_named_by_their_options(tmp_path):
    (tmp_path / "file").write_text("")
    check_writable({"job.dump_folder": tmp_path / "new" / "folder"})
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    folders = {"job.dump_folder": tmp_path / "file" / "a", "checkpoint.folder": tmp_path / "file" / "b"}
    with pytest.raises(ConfigError) as caught:
        check_writable({**folders, "metrics.save_tb_folder": tmp_path})
    starts = [f'{option} = "{folder}": cannot be written: Not a directory; ' for option, folder in folders.items()]
    assert [line.startswith(start) for line, start in zip(caught.value.problems, starts, strict=True)] == [True] * 2
    line = rejection(open_lock(tmp_path / "file" / "a").acquire)
    assert line == "the folder: cannot be written: Not a directory"
