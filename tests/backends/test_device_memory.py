"""Memory that is given up and taken again: of tensors, of the embedded engine, of the learner."""

# torch's storages are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import torch

from penstock.backends.device_memory import ParkedMemory


def test_values_views_and_references_are_as_they_were() -> None:
    weight = torch.randn(6, 4)
    view, transposed, parameter = weight[2:], weight.t(), torch.nn.Parameter(weight)
    before = weight.clone()
    parked = ParkedMemory([weight], keeps_values=True)
    assert weight.untyped_storage().nbytes() == 0
    assert parked.size_bytes == before.nbytes
    parked.restore()
    for found, expected in ((weight, before), (view, before[2:]), (transposed, before.t()), (parameter.data, before)):
        assert torch.equal(found, expected)
    view.add_(1)
    assert torch.equal(parameter.data[2:], before[2:] + 1)


def test_memory_that_is_shared_is_given_up_once() -> None:
    weight = torch.randn(8)
    parked = ParkedMemory([weight, weight[:3], weight.view(2, 4)], keeps_values=True)
    assert parked.size_bytes == 8 * 4
    parked.restore()
    assert weight.untyped_storage().nbytes() == 8 * 4


def test_what_is_parked_can_be_read_on_the_host() -> None:
    weight, other = torch.arange(12.0).view(3, 4), torch.ones(2)
    column = weight[:, 1]
    parked = ParkedMemory([weight], keeps_values=True)
    assert torch.equal(parked.on_host(weight), torch.arange(12.0).view(3, 4))
    assert parked.on_host(column).tolist() == [1.0, 5.0, 9.0], "a view that nobody had mentioned"
    assert parked.on_host(other) is other


def test_memory_whose_values_are_not_kept_has_its_size_again() -> None:
    weight = torch.randn(5, 5)
    parked = ParkedMemory([weight], keeps_values=False)
    parked.restore()
    weight.fill_(3)
    assert weight.sum().item() == 75


def test_gradients_and_an_optimizer_go_on_with_parameters_that_were_parked() -> None:
    """As a learner on a GPU sleeps between two steps."""

    def trained(*, sleeps: bool) -> list[float]:
        torch.manual_seed(3)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            model(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if sleeps:
                state = [value for moments in optimizer.state.values() for value in moments.values()]
                ParkedMemory([*model.parameters(), *state], keeps_values=True).restore()
        return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]

    assert trained(sleeps=True) == trained(sleeps=False)
