"""How tfds_episodes.tfrecord was made: RT-1's features with small pictures, written by tensorflow-datasets 4.9.10
(TensorFlow 2.21).

    python make_tfds_episodes.py FOLDER      in an environment that has tensorflow-datasets

prints, for each episode in file order, its instruction, its number of frames, and the SHA-256 of frames and actions as
tfds reads them.
"""

import hashlib
import sys

import numpy as np
import tensorflow_datasets as tfds

PARTS = {
    "base_displacement_vector": 2,
    "base_displacement_vertical_rotation": 1,
    "gripper_closedness_action": 1,
    "rotation_delta": 3,
    "world_vector": 3,
}


class Fractal(tfds.core.GeneratorBasedBuilder):
    """Three random episodes."""

    VERSION = tfds.core.Version("0.1.0")

    def _info(self):
        action = {name: tfds.features.Tensor(shape=(width,), dtype=np.float32) for name, width in PARTS.items()}
        action["terminate_episode"] = tfds.features.Tensor(shape=(3,), dtype=np.int32)
        picture = tfds.features.Image(shape=(24, 32, 3), dtype=np.uint8, encoding_format="jpeg")
        observation = {"image": picture, "natural_language_instruction": tfds.features.Text()}
        steps = {
            "observation": observation,
            "action": action,
            "reward": np.float32,
            "is_first": np.bool_,
            "is_last": np.bool_,
        }
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict({"steps": tfds.features.Dataset(steps)})
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        rng = np.random.default_rng(0)
        for episode in range(3):
            steps = []
            for t in range(4 + episode):
                action = {name: rng.normal(size=width).astype(np.float32) for name, width in PARTS.items()}
                action["terminate_episode"] = rng.integers(0, 2, 3).astype(np.int32)
                picture = rng.integers(0, 256, (24, 32, 3)).astype(np.uint8)
                observation = {"image": picture, "natural_language_instruction": f"pick can {episode}"}
                steps.append(
                    {"observation": observation, "action": action, "reward": 0.0, "is_first": t == 0, "is_last": False}
                )
            yield episode, {"steps": steps}


def main():
    builder = Fractal(data_dir=sys.argv[1])
    builder.download_and_prepare()
    skip = {"steps": {"observation": {"image": tfds.decode.SkipDecoding()}}}
    for episode in builder.as_dataset(split="train", decoders=skip):
        steps = list(episode["steps"])
        digest = hashlib.sha256()
        for step in steps:
            digest.update(step["observation"]["image"].numpy())
        for step in steps:
            for name in sorted(step["action"]):
                digest.update(np.asarray(step["action"][name].numpy(), np.float32).tobytes())
        print(steps[0]["observation"]["natural_language_instruction"].numpy().decode(), len(steps), digest.hexdigest())


if __name__ == "__main__":
    main()
