"""Puts known defects back, one at a time, and counts the random jobs in virtual time that it takes to find each; for defects of scalerpc's
core, the random worlds, and for those of connections by packets the random operations over a bad network.

  scripts/defects               all defects that such jobs and worlds can find; fails if one is not found
  scripts/defects --only NAME   one defect; may be repeated
  scripts/defects --texts       checks that the sources still have the places of each; builds nothing
  scripts/defects --check       checks that, and that two of them are found

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

# What --check looks for: found within a few seeds.
CHEAP = ["credit-swallowed", "index-drift"]
# Seeds after which a defect counts as not found.
MOST_SEEDS = 2000
# Random worlds of scalerpc's core in a run of their test with COPYRPC_TEST_SCALE=1, and of operations by packets with MLX5_TEST_SCALE=1.
WORLDS, NETWORKS = 500, 200
CORE, COPYRPC, MLX5, SCALERPC, PACKETS = "benchkv/core/src", "copyrpc/src", "mlx5/src", "scalerpc/src/protocol", "mlx5/hca/src/packets"
# Defects that these jobs do not find, for the reason in docs/reliability.md: they are put back only if named.
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
                "return match endpoint.call(request.as_bytes(), whom, size_of::<Response>()) {",
                "return match endpoint.call(request.as_bytes(), whom, size_of::<Response>()) { Err(CallError::InsufficientCredit(_)) => Ok(()),",
            )
        ],
    ),
    "spin-for-room": (
        "a daemon without room in a ring tries until there is some, and serves nobody",
        [
            (
                f"{CORE}/backend/remote/mod.rs",
                "            each!(&mut self.links, links => match links.send(link, &request, whom) {",
                "            let mut whom = whom;\n            loop { each!(&mut self.links, links => match links.send(link, &request, whom) {",
            ),
            (
                f"{CORE}/backend/remote/mod.rs",
                "                Err(SendError::Full(whom)) => whom,\n                Err(SendError::Down(error)) => return Err(Box::new(error)),\n            })\n",
                "                Err(SendError::Full(again)) => whom = again,\n                Err(SendError::Down(error)) => return Err(Box::new(error)),\n            }) }\n",
            ),
        ],
    ),
    "last-first": (
        "the youngest of the requests that wait for room goes first",
        [(f"{CORE}/backend/backlog.rs", "while let Some((request, whom)) = queue.pop_front() {", "while let Some((request, whom)) = queue.pop_back() {")],
    ),
    "answers-in-order": (
        "an answer is taken for that of the oldest call, whichever it is of",
        [
            (
                f"{CORE}/backend/remote/calls.rs",
                "        let place = usize::from(id as u16);\n        let call = self.calls.get(place);\n        call.filter(|(number, _)| u32::from(*number) == id >> 16)?;",
                "        let _ = id;\n        let (place, _) = self.calls.iter().next()?;",
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
        [(f"{MLX5}/queues/sq.rs", "self.user = self.user.add(blocks.into());", "self.user = self.user.add(1);")],
    ),
}

# The same for scalerpc's core, whose defects random worlds have to find.
SCALERPC_DEFECTS = {
    "late-answer": (
        "an answer that comes after its client has left goes to the client that got its number",
        [(f"{SCALERPC}/server/replies.rs", "record.filter(|record| record.generation == request.generation)", "record")],
    ),
    "epoch-of-32-bits": (
        "a client compares 32 bits of an event's epoch with the last one closed",
        [(f"{SCALERPC}/client/arrivals.rs", f"Some(Event::{event} {{ {fields} }}) if epoch > closed_epoch", f"Some(Event::{event} {{ {fields} }}) if epoch as u32 > closed_epoch as u32") for event, fields in (("Activate", "epoch, zone"), ("Switch", "epoch"))],
    ),
    "slot-lost": (
        "the slot of a call that ran out of time does not become free when its response arrives",
        [(f"{SCALERPC}/client/calls.rs", "(self.ended | self.ended_later) >> slot & 1 == 0 {\n            self.free_slot(slot);", "(self.ended | self.ended_later) >> slot & 1 == 0 {")],
    ),
    "slot-freed-twice": (
        "it becomes free then, and again when the end of its call is taken",
        [(f"{SCALERPC}/client/calls.rs", "if (self.ended | self.ended_later) >> slot & 1 == 0 {", "{")],
    ),
    "timeout-frees-slot": (
        "the slot of a call that ran out of time is free at once, although its response may still come",
        [(f"{SCALERPC}/client/calls.rs", "                self.quarantined |= 1 << slot;\n                self.push_ended(slot, Err(CallFailure::TimedOut));", "                self.end_call(slot, Err(CallFailure::TimedOut));")],
    ),
    "number-lost": (
        "a call that ran out of time before it was offered keeps its number",
        [(f"{SCALERPC}/client/calls.rs", "Err(_) if !call.is_offered => call.sequence = call.sequence.wrapping_sub(1),\n", "")],
    ),
    "deadline-forgotten": (
        "when one call runs out of time, the deadlines of the others are forgotten",
        [(f"{SCALERPC}/client/calls.rs", "                self.expire_ns = self.expire_ns.min(deadline_ns);\n                continue;", "                continue;")],
    ),
    "lent-slot-used": (
        "an announced slot is used again while the server may be READing it",
        [(f"{SCALERPC}/client/calls.rs", "if self.lent >> slot & 1 != 0 { return self.free_later(slot); }", "if false { return self.free_later(slot); }")],
    ),
    "executed-twice": (
        "a request that is offered again after it was accepted runs again",
        [(f"{SCALERPC}/server/intake.rs", "ReqId::of(slot, last.wrapping_add(1))", "ReqId::of(slot, last.wrapping_add(u32::from(Trailer::from_word(word).valid != valid(*last))))")],
    ),
    "left-requests-run": (
        "requests of a client that has left run",
        [(f"{SCALERPC}/server/mod.rs", "self.dispatch.retain(|queued| queued.request.client != client);", "")],
    ),
    "zone-freed-early": (
        "a zone is free after its release, although requests wait in it",
        [(f"{SCALERPC}/server/zones.rs", "if is_released && queued == 0 {", "if is_released {")],
    ),
    "worker-dies": (
        "a request of a worker that dies is not answered",
        [(f"{SCALERPC}/handlers.rs", "        self.end(Err(Status::Dropped));\n", "")],
    ),
    "buffers-of-the-dead": (
        "the response buffers of a client that has left are lost",
        [(f"{SCALERPC}/server/mod.rs", "self.buffers.release_oldest(&mut record.responses, u16::MAX);", "record.responses = Chain::EMPTY;")],
    ),
    "buffer-freed-early": (
        "the end of a response's WRITE frees the buffer of the response behind it too",
        [(f"{SCALERPC}/buffers.rs", "for _ in 1..count {", "for _ in 0..count {")],
    ),
    "buffer-kept": (
        "a request that is answered later keeps its response buffer, and gets another one",
        [(f"{SCALERPC}/server/replies.rs", "        if let Some(buffer) = request.buffer.take() {\n            self.buffers.release(buffer);\n        }", "        request.buffer = None;")],
    ),
    "old-announcement": (
        "a client is admitted with the announcement and the release of the client that had its number",
        [(f"{SCALERPC}/server/mod.rs", "        self.clear_entry(client);\n", "")],
    ),
    "late-unprobed": (
        "a client that waits for nothing but late responses does not probe its server",
        [(f"{SCALERPC}/client/mod.rs", "self.pending | self.lent != 0", "self.pending & !self.quarantined != 0")],
    ),
    "evicted-unseen": (
        "a client is evicted without a check for its release, although the server was away",
        [(f"{SCALERPC}/server/zones.rs", "                self.take_entry(client);\n", "")],
    ),
}

# The same for connections by packets, whose defects random operations over a bad network have to find.
PACKET_DEFECTS = {
    "ack-lost": (
        "a request is not sent again when its ACK does not come",
        [(f"{PACKETS}/requester.rs", "if !self.timer.is_running() && !self.options.is_unreliable { self.timer.wait(now_ns); }", "")],
    ),
    "read-not-repeated": (
        "a READ that is asked for again is not answered again",
        [(f"{PACKETS}/responder.rs", "let is_known = end.since(psn) > 0", "let is_known = false && end.since(psn) > 0")],
    ),
    "atomic-repeated": (
        "an atomic that is asked for again is executed again",
        [(f"{PACKETS}/responder.rs", "if let Some(&(_, original)) = self.atomics.iter().rev().find(|(known, _)| *known == psn && !waits) {", "if let Ok(original) = target.execute(headers.opcode.opcode, &headers.atomic) {")],
    ),
    "busy-is-fatal": (
        "a request is refused without limit when too many answers wait, which repeats of earlier requests may have caused",
        [(f"{PACKETS}/responder.rs", "            Err(Refusal::Busy) => {}\n", "            Err(Refusal::Busy) => self.fatal = Some(Nak::InvalidRequest),\n")],
    ),
    "rnr-in-the-middle": (
        "a responder without a receive for the last packet of a message forgets the packets before it",
        [(f"{PACKETS}/responder.rs", "            Err(Refusal::NotReady) => {\n", "            Err(Refusal::NotReady) => {\n                self.current = None;\n")],
    ),
    "ack-waits-for-ever": (
        "messages that did not ask for an ACK get none when no further message comes",
        [(f"{PACKETS}/responder.rs", "is_some_and(|ack_ns| ack_ns <= now_ns)", "is_some_and(|ack_ns| ack_ns > now_ns + ACK_DELAY_NS)")],
    ),
    "psn-wrap": (
        "PSNs are compared as numbers that do not wrap",
        [("mlx5/wire/src/roce/psn.rs", "(self.0.wrapping_sub(earlier.0) << 8) as i32 >> 8", "self.0 as i32 - earlier.0 as i32")],
    ),
    "retry-without-end": (
        "retries are not counted",
        [(f"{PACKETS}/requester.rs", "            self.retries += 1;\n", "")],
    ),
    "nak-after-nak": (
        "a responder answers each packet behind a gap with a NAK, and its requester begins anew with each",
        [
            (f"{PACKETS}/responder.rs", "            _ if self.is_asked_for => {}\n", ""),
            (f"{PACKETS}/requester.rs", "            self.is_known_lost = true;\n", ""),
        ],
    ),
    "report-acknowledges": (
        "a requester takes a packet that its peer holds for executed, also if it is then refused for lack of a receive",
        [(f"{PACKETS}/requester.rs", "self.flight.arrive(psn, psn.after(1), State::Held, now_ns);", "self.flight.arrive(psn, psn.after(1), State::Done, now_ns);")],
    ),
    "held-out-of-place": (
        "a responder executes a packet that it holds in place of the expected one",
        [(f"{PACKETS}/held.rs", "self.0.drain(..executed.min(self.0.len()));", "self.0.drain(..(executed + 1).min(self.0.len()));")],
    ),
    "refusal-forgotten": (
        "a packet that was refused for lack of a receive counts as under way when another one is found to have been sent again without need",
        [(f"{PACKETS}/requester.rs", "&& !self.timer.is_paused() && self.window", "&& self.window")],
    ),
    "refused-while-held": (
        "a requester does not send a packet again that its peer held and then refused for lack of a receive",
        [(f"{PACKETS}/flight.rs", "State::Held => drops_held || nth == 0,", "State::Held => drops_held,")],
    ),
}
# By package: its defects, and the test that has to find them.
FOUND_BY = {"benchkv-core": (DEFECTS, "swarm"), "scalerpc": (SCALERPC_DEFECTS, "everything_goes_wrong"), "mlx5-hca": (PACKET_DEFECTS, "packets::tests::p")}


def places(source, text):
    """Returns where the source has the text, however either is broken into lines: with a comma behind the last of a list, or without."""
    tokens = [(r",?\s*" if token in ")]}" else "") + re.escape(token) for token in re.findall(r"\w+|[^\w\s]", text)]
    return list(re.finditer(r"\s*(?://[/!]?\s*)?".join(tokens), source))


def put_back(root, changes):
    """Makes the changes in the sources under `root`."""
    for path, text, other in changes:
        file = root / path
        source = file.read_text()
        found = places(source, text)
        if len(found) != 1:
            raise tools.Failure(f"{path} has this {len(found)} times and not once:\n{text}")
        file.write_text(source[: found[0].start()] + other.strip() + source[found[0].end() :])


def copy(root):
    """Copies the sources to `root`; unchanged files keep their times, so that cargo builds only the changes."""
    listed = tools.output(["git", "-C", str(tools.ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    for path in filter(None, listed.split("\0")):
        source, target = tools.ROOT / path, root / path
        if not source.is_file() or (target.is_file() and target.read_bytes() == source.read_bytes()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def built(root, package, *, optimised):
    """Builds the unit tests of a package of the sources under `root`."""
    environment = {**os.environ, "CARGO_TARGET_DIR": str(root.parent / "target"), "CARGO_PROFILE_DEV_DEBUG": "none"}
    command = ["cargo", "test", "--no-run", "-q", "--locked", "-p", package, "--lib", "--message-format=json", "--manifest-path", str(root / "Cargo.toml")]
    if not optimised:
        named = re.findall(r"(?m)^\[profile\.dev\.package\.(.*)\]", (root / "Cargo.toml").read_text())
        command += [f"--config=profile.dev.package.{name}.opt-level=0" for name in named]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise tools.Failure(f"the sources with the defect cannot be built:\n{done.stderr[-4000:]}")
    return re.findall(r'"executable":"([^"]+)"', done.stdout)[-1]


def hunt(program, test):
    """Runs random jobs, or worlds, until one fails. Returns its seed, the first being 1, and the failure; `None` if none failed."""
    environment = {**os.environ, "SWARM_SEED": "1", "SWARM_SEEDS": str(MOST_SEEDS), "RUST_BACKTRACE": "0"}
    environment |= {"COPYRPC_TEST_FIRST_SEED": "1", "COPYRPC_TEST_SCALE": str(MOST_SEEDS // WORLDS), "MLX5_TEST_SCALE": str(MOST_SEEDS // NETWORKS)}
    done = subprocess.run([program, test, "--nocapture", "--test-threads=1"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment, check=False)
    if done.returncode == 0:
        return None
    if -done.returncode in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        raise tools.Failure(f"the random jobs were ended from outside, by signal {-done.returncode}")
    tests = done.stdout.split("\ntest ")
    failed = [part for part in tests if re.search("panicked at|does not end", part)] or tests[-1:]
    # A test without seeds tries one thing.
    seeds = re.findall(r"^seed (\d+)\b", failed[0], re.M) or ["1"]
    told = re.findall(r"panicked at ([^\n]*)\n([^\n]*)|(does not end)", done.stdout)
    where, what, endless = told[0] if told else ("", f"status {done.returncode}", "")
    return int(seeds[-1]), endless or f"{what} ({pathlib.Path(where.split(':')[0]).name})" if where else endless or what


def main():
    """Runs the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", action="append", metavar="NAME", default=[])
    asked = parser.parse_args()
    known = {name: (*defect, package, test) for package, (defects, test) in FOUND_BY.items() for name, defect in defects.items()}
    unknown = [name for name in asked.only if name not in known]
    if unknown:
        parser.error(f"{unknown[0]} is no defect; there are {', '.join(known)}")
    if asked.check or asked.texts:
        texts = [(path, text) for _, changes, *_ in known.values() for path, text, _ in changes]
        gone = [f"{path}: {text}" for path, text in texts if len(places((tools.ROOT / path).read_text(), text)) != 1]
        if gone:
            raise tools.Failure("\n".join(["this is not in the sources once any more, so that a defect of scripts/measuring/defects.py cannot be put back:", *gone]))
        print(f"{len(known)} defects can be put back")
        if asked.texts:
            return 0
        asked.only = CHEAP
    root = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", tools.ROOT / "target")).resolve() / "defects" / "sources"
    missed = []
    print("| defect | what it was | seeds | found by |\n|---|---|---|---|")
    for name, (what, changes, package, test) in known.items():
        if name not in (asked.only or set(known) - set(NOT_SHOWN)):
            continue
        copy(root)
        put_back(root, changes)
        # What is found within a few seeds is found sooner without optimisation, which takes half of the build.
        found = hunt(built(root, package, optimised=not asked.check), test)
        if found is None:
            missed.append(name)
        seeds, how = found or (f"none of {MOST_SEEDS}", "")
        print(f"| {name} | {what} | {seeds} | {how} |", flush=True)
    if missed:
        raise tools.Failure(f"not found: {', '.join(missed)}")
    return 0
