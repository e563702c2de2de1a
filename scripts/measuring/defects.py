"""Puts known defects back, one at a time, and counts the random jobs in virtual time that it takes to find each.

  scripts/defects               all defects that such jobs can find; fails if one is not found
  scripts/defects --only NAME   one defect; may be repeated
  scripts/defects --check       only checks that each can still be put back; takes no time

Each defect is a change of the sources, made in a copy of them under the target folder. A defect that cannot be put back, because its code has
changed, must be rewritten here.
"""

import argparse
import os
import pathlib
import re
import shutil
import signal
import subprocess

from . import tools

# Seeds after which a defect counts as not found.
MOST_SEEDS = 2000
CORE, COPYRPC, MLX5 = "benchkv/core/src", "copyrpc/src", "mlx5/src"
# Defects that these jobs do not find, for the reason in docs/study.md: they are put back only if named.
NOT_SHOWN = ["idle-credit"]
LOST_CREDIT = "            self.starved = true;\n            self.stats.{} += 1;"

# By name: the defect, and the changes that put it back: file, text, replacement.
DEFECTS = {
    "no-refill": (
        "receives are not posted again, and nobody hears of it",
        [(f"{COPYRPC}/context.rs", "if self.srq.free() > self.max_free {", "if self.srq.free() > self.srq.depth() {")],
    ),
    "ring-end": (
        "a batch ends at the ring's end, or crosses it",
        [(f"{COPYRPC}/link/tx.rs", "position + ring.to_end(position) - ALIGNMENT", "position + ring.to_end(position) + ALIGNMENT")],
    ),
    "idle-credit": (
        "a caller without credit or room waits for a peer that has nothing to say",
        [
            (f"{COPYRPC}/link/outgoing.rs", LOST_CREDIT.format("insufficient_credit"), LOST_CREDIT.format("insufficient_credit").replace("true", "false")),
            (f"{COPYRPC}/link/outgoing.rs", LOST_CREDIT.format("ring_full"), LOST_CREDIT.format("ring_full").replace("true", "false")),
            (f"{COPYRPC}/link/flush.rs", "if free < self.tx.size().bytes() / 4 {", "if free > self.tx.size().bytes() {"),
            (f"{COPYRPC}/link/flush.rs", "if news && self.tx", "if news && false && self.tx"),
        ],
    ),
    "credit-swallowed": (
        "a call without credit is taken for one that failed, and forgotten",
        [
            (
                f"{CORE}/backend/remote/copyrpc.rs",
                "Err(CallError::RingFull(whom) | CallError::InsufficientCredit(whom)) => Err(SendError::Full(whom)),",
                "Err(CallError::RingFull(whom)) => Err(SendError::Full(whom)),\n            Err(CallError::InsufficientCredit(_)) => Ok(()),",
            )
        ],
    ),
    "spin-for-room": (
        "a daemon without room in a ring tries until there is some, and serves nobody",
        [
            (
                f"{CORE}/backend/remote/mod.rs",
                "        let whom = if backlog.is_empty() && link < self.open_links {\n            match each!(&mut self.carrier, links => links.send(link, &request, whom)) {",
                "        let mut whom = whom;\n        let whom = if backlog.is_empty() && link < self.open_links {\n            loop {\n            match each!(&mut self.carrier, links => links.send(link, &request, whom)) {",
            ),
            (
                f"{CORE}/backend/remote/mod.rs",
                "                Err(SendError::Full(whom)) => whom,\n                Err(SendError::Down(error)) => return Err(error),\n            }\n        } else {",
                "                Err(SendError::Full(again)) => whom = again,\n                Err(SendError::Down(error)) => return Err(error),\n            }\n            }\n        } else {",
            ),
        ],
    ),
    "clients-starve": (
        "a daemon that found its clients idle does not look at them again",
        [(f"{CORE}/policy/skip_idle.rs", "            self.left = self.rounds;", "            self.left = u32::MAX;")],
    ),
    "last-first": (
        "the youngest of the requests that wait for room goes first",
        [(f"{CORE}/backend/remote/mod.rs", "while let Some((request, whom)) = backlog.pop_front() {", "while let Some((request, whom)) = backlog.pop_back() {")],
    ),
    "answers-in-order": (
        "an answer is taken for that of the oldest call, whichever it is of",
        [
            (
                f"{CORE}/backend/remote/calls.rs",
                "        let number = id as u16;\n        let place = self.places.get_mut(usize::from(number)).filter(|place| u32::from(place.uses) == id >> 16)?;",
                "        let number = self.places.iter().position(|place| place.whom.is_some())? as u16;\n        let _ = id;\n        let place = self.places.get_mut(usize::from(number))?;",
            )
        ],
    ),
    "slot-reused": (
        "the bytes of a request are free as soon as any request behind it is answered",
        [(f"{COPYRPC}/link/held.rs", "            self.room[place].internal_allowance = 0;", "            self.room[place].internal_allowance = 0;\n            self.oldest += 1;")],
    ),
    "inline-size": (
        "a WQE is counted as 4 + align(n) bytes of inline data, in the place of align(4 + n)",
        [("mlx5/wire/src/data.rs", "(Self::LEN + bytes - 1) / SEGMENT + 1", "(Self::LEN + bytes.next_multiple_of(SEGMENT)) / SEGMENT")],
    ),
    "index-drift": (
        "the table of what was posted counts WQEs, and the completions WQEBBs",
        [(f"{MLX5}/sq.rs", "self.user = self.user.add(blocks.into());", "self.user = self.user.add(1);")],
    ),
}


def put_back(root, changes):
    """Makes the changes in the sources under `root`."""
    for path, text, other in changes:
        file = root / path
        source = file.read_text()
        if source.count(text) != 1:
            raise tools.Failure(f"{path} has this {source.count(text)} times and not once:\n{text}")
        file.write_text(source.replace(text, other))


def copy(root):
    """Copies the sources to `root`; unchanged files keep their times, so that cargo builds only the changes."""
    listed = tools.output(["git", "-C", str(tools.ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    for path in filter(None, listed.split("\0")):
        source, target = tools.ROOT / path, root / path
        if not source.is_file() or (target.is_file() and target.read_bytes() == source.read_bytes()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def built(root):
    """Builds the random jobs of the sources under `root`."""
    environment = {**os.environ, "CARGO_TARGET_DIR": str(root.parent / "target"), "CARGO_PROFILE_DEV_DEBUG": "none"}
    command = ["cargo", "test", "--no-run", "-q", "--locked", "-p", "benchkv-core", "--lib", "--message-format=json", "--manifest-path", str(root / "Cargo.toml")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise tools.Failure(f"the sources with the defect cannot be built:\n{done.stderr[-4000:]}")
    return re.findall(r'"executable":"([^"]+)"', done.stdout)[-1]


def hunt(program):
    """Runs random jobs until one fails. Returns the number that did not, and the failure; `None` if none failed."""
    environment = {**os.environ, "SWARM_SEED": "1", "SWARM_SEEDS": str(MOST_SEEDS), "RUST_BACKTRACE": "0"}
    done = subprocess.run([program, "swarm", "--nocapture"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment, check=False)
    if done.returncode == 0:
        return None
    if -done.returncode in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        raise tools.Failure(f"the random jobs were ended from outside, by signal {-done.returncode}")
    seeds = re.findall(r"^seed (\d+)$", done.stdout, re.M)
    told = re.findall(r"panicked at ([^\n]*)\n([^\n]*)|(does not end)", done.stdout)
    where, what, endless = told[0] if told else ("", f"status {done.returncode}", "")
    return int(seeds[-1]), endless or f"{what} ({pathlib.Path(where.split(':')[0]).name})" if where else endless or what


def main():
    """Runs the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", action="append", metavar="NAME", default=[])
    asked = parser.parse_args()
    unknown = [name for name in asked.only if name not in DEFECTS]
    if unknown:
        parser.error(f"{unknown[0]} is no defect; there are {', '.join(DEFECTS)}")
    if asked.check:
        texts = [(path, text) for _, changes in DEFECTS.values() for path, text, _ in changes]
        gone = [f"{path}: {text}" for path, text in texts if (tools.ROOT / path).read_text().count(text) != 1]
        if gone:
            raise tools.Failure("\n".join(["this is not in the sources once any more, so that a defect of scripts/measuring/defects.py cannot be put back:", *gone]))
        print(f"{len(DEFECTS)} defects can be put back")
        return 0
    root = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", tools.ROOT / "target")).resolve() / "defects" / "sources"
    missed = []
    print("| defect | what it was | seeds | found by |\n|---|---|---|---|")
    for name, (what, changes) in DEFECTS.items():
        if name not in (asked.only or set(DEFECTS) - set(NOT_SHOWN)):
            continue
        copy(root)
        put_back(root, changes)
        found = hunt(built(root))
        if found is None:
            missed.append(name)
        seeds, how = found or (f"none of {MOST_SEEDS}", "")
        print(f"| {name} | {what} | {seeds} | {how} |", flush=True)
    if missed:
        raise tools.Failure(f"not found: {', '.join(missed)}")
    return 0
