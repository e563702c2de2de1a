"""Shared by the measuring scripts: programs that cargo builds, JSON documents, and errors for the user."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


class Failure(Exception):
    """Ends the script with a message; the exit status is 1, or 2 for a wrong command line."""

    def __init__(self, message, status=1):
        super().__init__(message)
        self.status = status


def run(name, main):
    """Runs `main` as the script `name` and exits with its status."""
    try:
        status = main()
    except Failure as failure:
        print(f"{name}: {failure}", file=sys.stderr)
        status = failure.status
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        # The reader of the table has closed the pipe; nothing is written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    sys.exit(status)


def need(program, how="scripts/install-deps installs it"):
    """Fails unless `program` can be found."""
    if shutil.which(program) is None:
        raise Failure(f"{program} is missing; {how}")


def output(command, **options):
    """Returns the standard output of `command`. Fails with its output if its status is not 0."""
    try:
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False, **options)
    except subprocess.TimeoutExpired as error:
        raise Failure(f"{' '.join(map(str, command))} did not end in {error.timeout} s") from error
    if done.returncode != 0:
        raise Failure(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def built(folder, kind, name=None, **options):
    """Builds a program of the package in `folder` and returns its path: the bin, bench, example or test called `name`, or its unit tests (lib)."""
    return built_all(folder, kind, [name], **options)[0]


def built_all(folder, kind, names, *, release=True, features=(), workspace=ROOT, beside=None):
    """Builds programs of one kind of the package in `folder` by one run of cargo, and returns their paths in the order of `names`.

    Always selects the whole workspace: with `-p`, cargo unifies the features of fewer packages, and builds the dependencies again. A bin that
    is built `beside` a test of this name has the features of the tests, which may have built it already.
    """
    is_test = beside is not None or kind in ("test", "lib")
    command = ["cargo", "test", "--no-run"] if is_test else ["cargo", "build"]
    command += ["--workspace", "-q", "--locked", "--message-format=json", "--manifest-path", str(workspace / "Cargo.toml")]
    command += ["--test", beside] if beside else ["--lib"] if kind == "lib" else [word for name in names for word in (f"--{kind}", name)]
    command += ["--release"] if release else []
    command += ["--features", ",".join(features)] if features else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise Failure(f"cargo could not build {folder}: {kind} {' '.join(filter(None, names))}")
    manifest, found = str(workspace / folder / "Cargo.toml"), {}
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message["reason"] != "compiler-artifact" or message["manifest_path"] != manifest or not message["executable"]:
            continue
        target = message["target"]
        if kind == "lib" and not {"lib", "cdylib"}.isdisjoint(target["kind"]):
            found[None] = message["executable"]
        elif kind in target["kind"]:
            found[target["name"]] = message["executable"]
    for name in names:
        if name not in found:
            raise Failure(f"cargo built no {kind} {name or ''} of {folder}")
    return [found[name] for name in names]


def write_json(document, where, table):
    """Writes `document` to standard output (`-`), or to the file `where` and then `table()`; without `where`, the table only."""
    if where != "-":
        if where:
            pathlib.Path(where).write_text(json.dumps(document, indent=2) + "\n")
        table()
    else:
        print(json.dumps(document, indent=2))
