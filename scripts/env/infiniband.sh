# Settings for InfiniBand, taken with NETWORK=infiniband; what is set already stays. Untried: no such network was at hand.
# A line is `export NAME=${NAME:-VALUE} # why`. Values must be alike on all nodes; names of devices are the site's own.

export NCCL_IB_HCA=${NCCL_IB_HCA:-mlx5} # adapters whose name begins so; list those of the compute network where a host has storage ones too
export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22} # 4.096 us * 2^22 = 17 s for an answer: a link that retrains must not end the run
export NCCL_IB_RETRY_CNT=${NCCL_IB_RETRY_CNT:-7} # the most the hardware knows; with the line above a lost peer takes 2 min
export NCCL_IB_QPS_PER_CONNECTION=${NCCL_IB_QPS_PER_CONNECTION:-1} # a subnet manager routes by destination: more queue pairs bring nothing but on adaptive routing
export NCCL_NET_GDR_LEVEL=${NCCL_NET_GDR_LEVEL:-PXB} # GPU memory to adapter without the CPU where both are behind PCI switches
export NCCL_CROSS_NIC=${NCCL_CROSS_NIC:-0} # adapter i talks to adapter i: what a rail-optimised network is built for; 2 where all meet in one switch
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-ib0} # IP over InfiniBand, only where the launcher didn't find the interface to MASTER_ADDR
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$GLOO_SOCKET_IFNAME} # NCCL's own meeting goes by IP; its data doesn't
