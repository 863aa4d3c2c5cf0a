import pytest

import hyperslab as hs
from hyperslab.comm import exchange_cost
from hyperslab.comm.exchange_cost import measure_exchange


@pytest.mark.ranks(4)
@pytest.mark.parametrize("nbytes", [128, 1 << 16])
def test_an_exchange_with_all_neighbours_is_timed(nbytes):
    mesh = hs.init(sample=2, depth=2, device="cpu", timeout_seconds=100)
    cost = measure_exchange(mesh, nbytes, repeats=2)
    assert cost.nbytes == nbytes
    assert 0 < cost.host_us <= cost.us
    assert cost.graph_us is None


@pytest.mark.ranks(3)
def test_boxes_that_are_not_the_neighbours_stop_all():
    mesh = hs.init(depth=3, device="cpu", timeout_seconds=100)
    post = exchange_cost.post_fetch
    words = rf"rank {mesh.rank} fetched boxes that sum to "
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_cost, "post_fetch", lambda x, *more: post(x + 1, *more))
        with pytest.raises(hs.CommError, match=words):
            measure_exchange(mesh, 1024)
