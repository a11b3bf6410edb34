"""A function that runs as long as a block does, and what comes out when either fails."""

from __future__ import annotations

import gc
import weakref

import pytest
import trio

from trioserve.alongside import alongside


async def fail_at_its_end() -> None:
    try:
        await trio.sleep_forever()
    finally:
        raise KeyError("function")


async def fail_at_once() -> None:
    await trio.lowlevel.checkpoint()
    raise KeyError("function")


async def test_an_exception_of_the_block_comes_out_as_it_is() -> None:
    with pytest.raises(ValueError, match="block"):
        async with alongside(trio.sleep_forever):
            raise ValueError("block")


async def test_when_both_fail_both_come_out() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with alongside(fail_at_its_end):
            raise ValueError("block")
    assert [repr(one) for one in caught.value.exceptions] == [
        "ValueError('block')",
        "KeyError('function')",
    ]


async def test_a_function_that_fails_cancels_the_block() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with alongside(fail_at_once):
            await trio.sleep_forever()
    assert [repr(one) for one in caught.value.exceptions] == ["KeyError('function')"]


@pytest.mark.parametrize("is_nested", [False, True])
async def test_both_cancelled_from_outside_is_cancelled_once(is_nested: bool) -> None:
    with trio.CancelScope() as scope:
        async with alongside(trio.sleep_forever):
            scope.cancel()
            if is_nested:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.sleep_forever)
                    nursery.start_soon(trio.sleep_forever)
            await trio.sleep_forever()
    assert scope.cancelled_caught


@pytest.mark.parametrize("does_function_fail", [False, True])
async def test_an_exception_of_the_block_is_freed_without_the_collector(
    does_function_fail: bool,
) -> None:
    class BlockError(Exception):
        pass

    def make() -> BlockError:
        error = BlockError()
        made.append(weakref.ref(error))
        return error

    made: list[weakref.ref[BlockError]] = []
    gc.collect()
    gc.disable()
    try:
        try:
            async with alongside(fail_at_its_end if does_function_fail else trio.sleep_forever):
                raise make()
        except Exception:
            assert made[0]() is not None
        assert made[0]() is None
    finally:
        gc.enable()


async def test_what_a_failed_function_does_to_the_block_is_its_context() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with alongside(fail_at_once):
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                raise ValueError("block") from None
    assert [repr(one) for one in caught.value.exceptions] == ["KeyError('function')"]
    assert repr(caught.value.__context__) == "ValueError('block')"


async def test_a_block_that_fails_while_all_is_cancelled_is_heard() -> None:
    with pytest.raises(ValueError, match="block"), trio.CancelScope() as scope:
        async with alongside(trio.sleep_forever):
            scope.cancel()
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                raise ValueError("block") from None


async def test_a_function_that_fails_while_all_is_cancelled_is_heard() -> None:
    with trio.CancelScope() as scope, pytest.RaisesGroup(KeyError, trio.Cancelled):
        async with alongside(fail_at_its_end):
            scope.cancel()
            await trio.sleep_forever()
