import pytest

from benchmarks.peers.timing import Timing, measure, poll_until


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_never_more_jobs_are_outstanding_than_asked_and_all_are_awaited_in_order(depth):
    outstanding, most, awaited = set(), [], []

    def submit(job):
        outstanding.add(job)
        most.append(len(outstanding))
        return job

    def wait(job):
        outstanding.remove(job)
        awaited.append(job)

    timing = measure(6, depth, submit, wait)
    assert (max(most), awaited, len(timing.each)) == (depth, list(range(6)), 6)
    assert not outstanding


def test_a_failed_job_is_heard():
    def fail(_job):
        raise RuntimeError("the copy failed")

    with pytest.raises(RuntimeError, match="the copy failed"):
        measure(2, 1, lambda job: job, fail)


def test_one_job_at_a_time_counts_by_the_median_and_several_by_the_whole_time():
    each = (0.5, 0.5, 8.0)
    assert Timing(each, 9.0, 1).gbps(10**9) == 2.0
    assert Timing(each, 3.0, 4).gbps(10**9) == 1.0
    assert Timing(each, 9.0, 1).ms_p50 == 500.0


def test_polling_ends_with_the_condition_or_names_what_did_not_come():
    answers = iter([False, False, True])
    poll_until(lambda: next(answers), 5, "never seen")
    with pytest.raises(TimeoutError, match="a block is visible"):
        poll_until(lambda: False, 0, "a block is visible")
