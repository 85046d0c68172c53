"""Links between hosts: rates, counters, and what the ledger says of bytes and times on them."""

import subprocess
import sys

import pytest

from benchmarks.link_case import step_seconds as measured_seconds
from benchmarks.link_prediction import bytes_a_step, step_seconds
from benchmarks.links import Traffic, bytes_per_second, fullest
from fivefold.comm.payloads import BLOCK, SCALE
from fivefold.config import job_with, resolve
from fivefold.models.inventory import parameters
from fivefold.problems import BadInput
from fivefold.replay.account import account

SMALL = {"model.preset": "tiny", "training.global_batch": 8}
LOCAL = {"layout.zero": 0, "communication.local_steps": 10}
TOTALS = 8 + 32
"""Bytes of the two small sums of each step."""


def test_a_rate_is_a_number_of_bits():
    assert bytes_per_second("100mbit") == 12.5e6
    assert bytes_per_second("0.5gbit") == 62.5e6


@pytest.mark.parametrize(
    "rate", ["100", "fast", "100mb", "-1mbit", "0mbit", "1 mbit", "100MBIT", "", "1e3kbit"]
)
def test_another_rate_is_refused(rate):
    with pytest.raises(BadInput) as refused:
        bytes_per_second(rate)
    assert str(refused.value).startswith(f"--rate: '{rate}' is not a rate\n    Write a number above 0")
    assert "kbit, mbit, gbit" in str(refused.value)


@pytest.mark.parametrize("program", ["slow_links", "hosts"])
def test_it_is_refused_before_anything_starts(program):
    words = [
        sys.executable,
        "-m",
        f"benchmarks.{program}",
        "--rate",
        "100mb",
        *(["ls"] * (program == "hosts")),
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("--rate: '100mb' is not a rate\n")


class Steady:
    """A host that sends a byte whenever it is asked."""

    asked = 0

    def sent(self) -> int:
        self.asked += 1
        return self.asked


def test_what_hosts_send_inside_the_block_is_counted():
    hosts = [Steady(), Steady()]
    hosts[0].sent()
    with Traffic(hosts) as traffic:
        assert hosts[1].sent() > 0
    assert traffic.sent == [hosts[0].asked - 2, hosts[1].asked - 1]


def test_the_fullest_window_is_found():
    """A host sends 30 bytes from second 2 to 4, the other 10 in second 6; one sample is late."""
    samples = [(0, [0, 0]), (1, [0, 0]), (2, [0, 0]), (3, [15, 0]), (4, [30, 0]), (6, [30, 0]), (7, [30, 10])]
    assert fullest(samples, 1.0) == 15
    assert fullest(samples, 2.0) == 15
    assert fullest(samples, 3.0) == 10
    assert fullest(samples[5:], 1.0) == 10
    assert fullest([(0, [0]), (8, [80])], 1.0) == 10


def test_a_round_of_local_steps_is_timed_as_one():
    """The first steps are left out; every fourth has the messages of its round in it."""
    records = [{"step_time_s": 9.0}] * 4 + [{"step_time_s": s} for s in (1.0, 1.0, 1.0, 5.0) * 3]
    assert measured_seconds(records, 4) == 2.0
    assert measured_seconds(records) == 1.0


def weights(job) -> int:
    return 4 * sum(parameter.count for parameter in parameters(job.spec))


@pytest.mark.parametrize(
    ("settings", "ranks_a_host", "times_the_gradients"),
    [
        ({"layout.zero": 0}, 1, 1.0),  # half of them in each of two passes around the ring
        ({"layout.zero": 0}, 2, 1.5),  # 2 x 3/4, by the one rank whose neighbour is elsewhere
        ({"layout.zero": 1, "layout.dp_shard": 4}, 2, 2.25),  # one gather, 3/4; over Gloo an all-reduce
        (
            {"layout.zero": 1, "layout.dp_replicate": 2},
            2,
            1.0,
        ),  # HSDP: two ranks sum their half with the other's
        ({"layout.zero": 0}, 4, 0.0),  # nothing leaves the only host
    ],
)
def test_bytes_that_leave_a_host(settings, ranks_a_host, times_the_gradients):
    ranks = 4 if ranks_a_host > 1 else 2
    job = resolve(job_with(SMALL, settings), ranks)
    small = 0 if ranks_a_host == ranks else TOTALS * 2 * (ranks - 1) / ranks
    assert bytes_a_step(job, ranks_a_host) == times_the_gradients * weights(job) + small


def test_bytes_in_8_bits_are_a_quarter():
    plain = resolve(job_with(SMALL, {"layout.zero": 0}), 4)
    compressed = resolve(job_with(SMALL, {"layout.zero": 0, "communication.compress": "int8"}), 4)
    # The exchange of parts is not a ring: each of 2 ranks sends half of its bytes to the other host.
    parts, sums = 2 * 1 / 2, 3 / 4
    expected = (parts + sums) / 4 * (1 + SCALE / BLOCK)
    assert bytes_a_step(compressed, 2) / weights(plain) == pytest.approx(expected, rel=0.01)


def test_a_step_is_compute_and_bytes_at_the_links_rate():
    job = resolve(job_with(SMALL, {"layout.zero": 0, "layout.bucket_mb": 1000.0}), 2)
    sending = bytes_a_step(job, 1) / 1e6
    assert step_seconds(job, 1, 3.0, 1e6) == pytest.approx(3.0 + sending)


def test_buckets_hide_behind_backward_but_for_one():
    job = resolve(job_with(SMALL, {"layout.zero": 0, "layout.bucket_mb": 0.5}), 2)
    buckets = sum(m.hides_behind == "backward" for m in account(job).messages)
    sending = bytes_a_step(job, 1) / 1e6
    assert buckets > 3
    assert step_seconds(job, 1, 3 * sending, 1e6) == pytest.approx(
        sending + 2 * sending + sending / buckets, rel=1e-4
    )


def test_a_sum_over_replicas_hides_behind_backward_but_for_a_part():
    """HSDP: embedding, 8 blocks and head, each summed between the hosts as soon as it is there."""
    job = resolve(job_with(SMALL, {"layout.zero": 3, "layout.dp_replicate": 2}), 4)
    sending = bytes_a_step(job, 2) / 1e6
    assert step_seconds(job, 2, 3 * sending, 1e6) == pytest.approx(3 * sending + sending / 10, rel=1e-4)


def test_weights_are_averaged_once_a_round():
    job = resolve(job_with(SMALL, LOCAL), 2)
    assert bytes_a_step(job, 1) == pytest.approx(weights(job) / 10, rel=1e-4)
    assert step_seconds(job, 1, 3.0, 1e6) == pytest.approx(3.0 + weights(job) / 1e7, rel=1e-4)


@pytest.mark.parametrize("fragments", [1, 2])
def test_an_average_hides_behind_the_steps_that_it_may_take(fragments):
    """Five of ten steps, or with two fragments all of them: what takes longer is waited for."""
    delayed = {"communication.outer_delay": 5, "communication.fragments": fragments}
    job = resolve(job_with(SMALL, LOCAL, delayed), 2)
    sending = bytes_a_step(job, 1) / 1e6
    assert step_seconds(job, 1, 4 * sending, 1e6) == pytest.approx(4 * sending)
    hidden = 0.8 * sending * fragments / 2
    assert step_seconds(job, 1, 0.8 * sending, 1e6) == pytest.approx(0.8 * sending + sending - hidden)
