"""What prompts cost the draft: seconds that no table of steady rounds holds, because they come with requests, not rounds."""

from __future__ import annotations

MEMORY = 64.0  # rounds with speculation
FADE = 256.0  # rounds without


class Intake:
    """Seconds per round with speculation in which the draft takes in prompts that it does not know yet: a mean over recent rounds.

    Requests that come and go make this a running cost of speculation: short answers to long prompts can make it lose where
    its rounds alone would gain. Without speculation nothing is learnt, and the estimate fades, so that it is tried again.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def spent(self, seconds: float) -> None:
        """A round with speculation has passed, in which prompts took `seconds`."""
        self.seconds += (seconds - self.seconds) / MEMORY

    def rest(self) -> None:
        """A round without speculation has passed."""
        self.seconds -= self.seconds / FADE
