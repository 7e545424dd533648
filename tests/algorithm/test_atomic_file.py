"""Files are there in full or not at all, and what killed writers left does not stay."""

import os
import resource
import signal
import threading
import time
import uuid
from pathlib import Path

import pytest

from braintrace_fast.algorithm import atomic_file
from tests.programs import start


def write(path, content=b'new'):
    atomic_file.write(path, lambda file: file.write(content))


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_what_a_killed_writer_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path):
    path = tmp_path / 'a.npz'
    writer = start('stuck_writer', path)
    try:
        assert writer.stdout.readline() == 'writing\n'
        write(path)
        assert path.read_bytes() == b'new'
        assert len(names(tmp_path)) == 2
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        writer.stderr.close()
    assert len(names(tmp_path)) == 2
    write(path, b'newer')
    assert names(tmp_path) == ['a.npz'] and path.read_bytes() == b'newer'


def leftover(folder, name, machine, age=0):
    path = folder / f'.{name}.{machine}{uuid.uuid4().hex}.tmp'
    path.write_bytes(b'part')
    os.utime(path, (time.time() - age,) * 2)
    return path.name


def test_what_other_machines_left_is_removed_when_it_is_old(tmp_path):
    young = [leftover(tmp_path, 'a', machine, 600) for machine in ('0123456789ab.', '')]
    for machine in ('0123456789ab.', ''):
        leftover(tmp_path, 'a', machine, 2 * atomic_file.STALE_SECONDS)
    write(tmp_path / 'a')
    assert names(tmp_path) == sorted(['a', *young])


def test_files_of_others_are_let_be(tmp_path):
    machine = atomic_file._machine() + '.'
    others = [leftover(tmp_path, 'b', machine), leftover(tmp_path, 'a.b', machine)]
    for name in ('.a.tmp', '.a.notes.tmp', 'a.tmp', '.axb.0.tmp'):
        (tmp_path / name).write_bytes(b'mine')
        others.append(name)
    write(tmp_path / 'a')
    assert names(tmp_path) == sorted(['a', *others])


def test_several_writers_at_once(tmp_path):
    path, errors = tmp_path / 'a', []

    def write_often(byte):
        try:
            for _ in range(20):
                write(path, byte * 100_000)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=write_often, args=(b,)) for b in (b'0', b'1', b'2')]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and names(tmp_path) == ['a']
    assert path.read_bytes() in [b * 100_000 for b in (b'0', b'1', b'2')]


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path):
    path = tmp_path / 'a'
    write(path, b'old')
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        with pytest.raises(OSError, match='too large'):
            write(path, bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == ['a'] and path.read_bytes() == b'old'


def test_a_symbolic_link_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / 'disk').mkdir()
    link, target = tmp_path / 'link', tmp_path / 'disk' / 'a'
    link.symlink_to(target)
    for content in (b'first', b'second'):
        write(link, content)
        assert link.is_symlink() and target.read_bytes() == content
    assert names(tmp_path / 'disk') == ['a']


def test_paths_that_cannot_be_written_are_refused_at_once(tmp_path):
    def never(file):
        raise AssertionError('written')

    with pytest.raises(IsADirectoryError, match='is a directory'):
        atomic_file.write(tmp_path, never)
    with pytest.raises(FileNotFoundError, match='There is no directory'):
        atomic_file.write(tmp_path / 'none' / 'a', never)
    assert not names(tmp_path)


def test_a_file_that_is_protected_is_not_replaced(tmp_path, monkeypatch):
    path = tmp_path / 'a'
    write(path, b'old')
    path.chmod(0o400)
    monkeypatch.setattr(os, 'access', lambda *_: False)  # root may write all files
    with pytest.raises(PermissionError, match='may not be written'):
        write(path)
    assert names(tmp_path) == ['a'] and path.read_bytes() == b'old'


def test_a_writer_whose_file_was_taken_for_a_leftover_opens_another(tmp_path, monkeypatch):
    flock, taken = atomic_file.fcntl.flock, []

    def slow_flock(file, how):
        if not taken:
            taken.append(file.name)
            Path(file.name).unlink()
        return flock(file, how)

    monkeypatch.setattr(atomic_file.fcntl, 'flock', slow_flock)
    write(tmp_path / 'a')
    assert taken and names(tmp_path) == ['a']
