# Settings for RDMA over Ethernet (RoCE v2), taken with NETWORK=roce; what is set already stays. Untried: no such network
# was at hand. A line is `export NAME=${NAME:-VALUE} # why`. Values must be alike on all nodes.

export NCCL_IB_HCA=${NCCL_IB_HCA:-mlx5} # adapters whose name begins so; list those of the compute network where a host has others
export NCCL_IB_GID_INDEX=${NCCL_IB_GID_INDEX:--1} # NCCL 2.21 and newer choose the RoCE v2 address by themselves; for older ones it is mostly 3 (show_gids)
export NCCL_IB_TC=${NCCL_IB_TC:-106} # traffic class of DSCP 26, which switches commonly keep free of loss: ask your network's people
export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22} # 4.096 us * 2^22 = 17 s for an answer: a pause storm must not end the run
export NCCL_IB_RETRY_CNT=${NCCL_IB_RETRY_CNT:-7} # the most the hardware knows; with the line above a lost peer takes 2 min
export NCCL_IB_QPS_PER_CONNECTION=${NCCL_IB_QPS_PER_CONNECTION:-4} # Ethernet spreads flows by hash: several a connection even out the links
export NCCL_NET_GDR_LEVEL=${NCCL_NET_GDR_LEVEL:-PXB} # GPU memory to adapter without the CPU where both are behind PCI switches
