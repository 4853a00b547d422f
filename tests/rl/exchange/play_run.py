"""Plays the world that the model of a run imagines and prints what was seen: `python -m ... RUN WORLD`. Helper module,
not a test.
"""

import json
import random
import sys
from pathlib import Path

from terrella.launch.imagined import Imagining, imagined_world
from terrella.rl.exchange.named_worlds import Play, find_world


def main(run: str, world: str) -> None:
    play = Play(imagined_world(Path(run), find_world(world), Imagining(max_new_tokens=16)))
    try:
        start, rng = play.reset(3), random.Random(0)
        first = play.step(play.random_action(rng))
        kept, action = json.loads(json.dumps(play.snapshot())), play.random_action(rng)
        second = play.step(action)
        play.restore(kept)
        again = play.step(action)
        frame = play.world.picture()
        told = {"name": play.named.name, "start": start.text, "info": first.info, "again": again == second}
        print(json.dumps(told | {"frame": None if frame is None else list(frame.shape)}))
    finally:
        play.world.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
