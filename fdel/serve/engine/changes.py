"""What is changed between the steps of an engine: its weights, and whether it holds memory for requests."""

from typing import Any

from fdel.serve.engine.core import Core, Deltas
from fdel.serve.engine.loop import Loop


class Changes(Loop):
    """A loop over a core whose weights can be replaced, which numbers them, and that can sleep."""

    _core: Core

    @property
    def version(self) -> int:
        """The number of the base's weights: how many updates there have been. See `Generation.versions`."""
        return self._core.versions[""]

    def update_params(
        self, params: Any, adapter: str = "", *, reshard: bool = False, cast: bool = False, reuse: bool = False
    ) -> int:
        """Serve with other weights from the next step on (an adapter that is new is added). They are copied.

        Running requests go on with their tokens so far, whose keys and values are computed again. `params`, stacked or
        listed, have the structure, shapes, dtypes and shardings of those that are served, and finite values, else
        ValueError, and nothing changes. `reshard` lays them out as those, from wherever they are; `cast` casts them. An
        engine on several processes is given them in process 0, which has them whole (`engine.follow`). `reuse` writes them
        over the engine's copies of before, where no adapter shares these: quicker, but `model.params` of before are then
        deleted, and nobody may score or embed meanwhile. The first update compiles the program that copies.

        Returns the number of the new weights, 1 for the first update of the base, or of an adapter of this name: tokens
        that they draw have it in `Generation.versions`. Weights that were there from the start have number 0.
        """
        device, number = self._core.device, list[int]()
        new = device.checked(adapter, params, reshard=reshard, cast=cast)

        def change() -> Deltas:
            deltas = self._core.replace_weights(adapter, new, reuse)
            number.append(self._core.versions[adapter])
            return deltas

        self._between_steps(change)
        return number[0]

    def sleep(self, *, weights: bool = False) -> None:
        """Free the device memory of cache and rows (and of the base's weights) until `wake`; the engine is paused.

        Requests under way and those that come wait for `wake`; keys and values are computed again, no output changes. With
        `weights`, `update_params` has to come before `wake`, and nothing is scored or embedded before it. Adapters share
        the base's arrays: ValueError for `weights` while there are any.
        """

        def change() -> Deltas:
            deltas = self._core.sleep(weights)
            self._paused = True
            return deltas

        self._between_steps(change)

    def wake(self) -> None:
        """Make an empty cache and rows again, and resume; nothing is compiled. An engine that is awake stays as it is.

        RuntimeError if the weights were let go of and `update_params` was not called since.
        """
        if self._core.asleep:
            self._between_steps(self._core.wake)
            self.resume()

    def resume(self) -> None:
        """Go on after `pause`. RuntimeError for an engine that sleeps."""
        if self._core.asleep:
            raise RuntimeError("the engine sleeps; call wake(), which also resumes")
        super().resume()

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; requests that still use it fail. The numbers of its weights go on if it is added again."""
        self._between_steps(lambda: self._core.drop_adapter(name))
