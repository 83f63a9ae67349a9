"""What prompts cost the draft: seconds that no table of steady rounds holds, because they come with requests, not rounds."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 256.0  # rounds that the rate of ending requests is a mean over
SMOOTHING = 0.125  # of the seconds a request
STAY = 64.0  # rounds that speculation is expected to stay on when it is switched on


@dataclass(frozen=True)
class Traffic:
    """What came and went with a round: requests that `ended` since the last one; `taken_in`: requests whose prompts the draft
    took in during it, in `seconds`."""

    ended: int = 0
    taken_in: int = 0
    seconds: float = 0.0


QUIET = Traffic()


class Intake:
    """Seconds per round that speculation spends on taking in prompts, predicted from requests per token and seconds per request.

    A draft takes a prompt in when it first drafts for the request, so requests that come and go make this a running cost of
    speculation, and with short answers to long prompts more than it gains. It is predicted for speculation that is off as
    well: switching on takes in the whole batch. Before any request has ended nothing is added.
    """

    def __init__(self) -> None:
        self.per_request = 0.0
        self._ended = self._tokens = 0.0

    def learn(self, traffic: Traffic, tokens: int) -> None:
        """A round has passed that emitted `tokens` tokens in all."""
        self._ended += traffic.ended - self._ended / MEMORY
        self._tokens += tokens - self._tokens / MEMORY
        if traffic.taken_in:
            now = traffic.seconds / traffic.taken_in
            self.per_request += (now - self.per_request) * (SMOOTHING if self.per_request else 1.0)

    def seconds(self, batch: int, tau: float, *, on: bool) -> float:
        """Return the seconds per round of `batch` requests that emit `tau` tokens each; `on`: speculation is on already."""
        if not self._tokens:
            return 0.0
        coming = batch * tau * self._ended / self._tokens
        return self.per_request * (coming + (0.0 if on else batch / STAY))
