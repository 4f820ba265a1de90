# Settings for Ethernet without RDMA, taken with NETWORK=ethernet; what is set already stays. On GPUs untried.
# A line is `export NAME=${NAME:-VALUE} # why`. Values must be alike on all nodes. The interface is the launcher's choice.

export NCCL_IB_DISABLE=${NCCL_IB_DISABLE:-1} # an adapter that offers RDMA on a network without it makes NCCL hang
export NCCL_SOCKET_NTHREADS=${NCCL_SOCKET_NTHREADS:-4} # one thread doesn't fill a link of 100 Gbit/s
export NCCL_NSOCKS_PERTHREAD=${NCCL_NSOCKS_PERTHREAD:-4} # a TCP connection doesn't either; threads times sockets may be 64 at most
