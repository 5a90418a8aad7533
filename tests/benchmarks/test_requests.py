"""The requests of the benchmarks: the same for everyone who is asked."""

from benchmarks import requests


def test_workloads_are_what_their_names_say():
    mixed, shared, long = (requests.prompts_of(64, 1000, 3, name) for name in requests.WORKLOADS)
    assert mixed == requests.prompts_of(64, 1000, 3) != requests.prompts_of(64, 1000, 4)
    assert 64 <= min(map(len, mixed)) < 128 and 900 < max(map(len, mixed)) <= 1024
    assert len({tuple(prompt[:512]) for prompt in shared}) == 4
    assert len({tuple(prompt[:513]) for prompt in shared}) > 50
    assert sum(len(prompt) > 4000 for prompt in long) == 8 and max(map(len, long)) + requests.NEW_TOKENS <= 8192


def test_requests_arrive_and_are_timed(monkeypatch):
    monkeypatch.setattr(requests, "SECONDS", 0.1)
    monkeypatch.setattr(requests, "NEW_TOKENS", 3)
    asked: dict[int, int] = {}

    def submit(number, prompt):
        asked[number] = 0

    def step():
        found = [(number, 1) for number, count in asked.items() if count < 3]
        asked.update({number: count + 1 for number, count in asked.items()})
        return found

    cases = requests.cases([50.0, 100.0, 80.0])
    assert cases == [(50, "mixed"), (80, "mixed"), (100, "mixed"), (80, "shared"), (80, "long")]
    found = requests.at_rate(80.0, 1000, submit, step, "shared")
    assert (found["rate"], found["workload"], found["requests"]) == (80, "shared", 8)
    assert 0 <= found["first_token_ms"][0] <= found["first_token_ms"][1] < 1000
    assert requests.cases([]) == []
