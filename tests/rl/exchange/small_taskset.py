"""A taskset of verifiers whose answer is known, and whose hostile tasks raise or hang. Helper module, not a test."""

import asyncio

import verifiers.v1 as vf

__all__ = ["SmallTaskset"]


class SmallData(vf.TaskData):
    number: int


class SmallTask(vf.Task[SmallData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.number == 13:
            raise OSError("the judge is away")
        if self.data.number == 14:
            await asyncio.sleep(1000)
        return float(trace.last_reply == str(2 * self.data.number))


class SmallConfig(vf.TasksetConfig):
    first: int = 0


class SmallTaskset(vf.Taskset[SmallTask, SmallConfig]):
    def load(self):
        for number in range(self.config.first, self.config.first + 20):
            yield SmallTask(
                SmallData(idx=number, prompt=f"Twice {number}?", system_prompt="Be short.", number=number),
                self.config.task,
            )
