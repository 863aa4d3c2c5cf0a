"""The mesh and what its ranks say to each other: the only home of ``torch.distributed`` calls."""

from hyperslab.comm.agree import agree as agree, agree_on as agree_on
from hyperslab.comm.fetch import fetch as fetch
from hyperslab.comm.join import init as init
from hyperslab.comm.mesh import Mesh as Mesh
from hyperslab.comm.reduce import gather_stacked as gather_stacked, reduce_sum as reduce_sum
