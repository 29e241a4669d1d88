// SPDX-License-Identifier: Apache-2.0

package bpf

// What the compiler is told, and why:
//   - bpfel alone: the flag bits of the ipcache value, hence the C, are for little-endian machines.
//   - -mcpu=v2 and -no-stack-coloring: 32-bit spills, and slots of the stack that serve twice, make the verifiers of
//     some kernels (6.1 is one) refuse the programs without CAP_PERFMON. v2 is known since Linux 4.14.
//   - -idirafter: where Debian has asm/types.h; the directory that does not exist is ignored.
//
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -no-global-types -output-stem from_netdev FromNetdev from_netdev.c -- -O2 -Wall -Wextra -Werror -mcpu=v2 -mllvm -no-stack-coloring -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -no-global-types -output-stem to_netdev ToNetdev to_netdev.c -- -O2 -Wall -Wextra -Werror -mcpu=v2 -mllvm -no-stack-coloring -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -no-global-types -output-stem from_overlay FromOverlay from_overlay.c -- -O2 -Wall -Wextra -Werror -mcpu=v2 -mllvm -no-stack-coloring -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -no-global-types -output-stem to_overlay ToOverlay to_overlay.c -- -O2 -Wall -Wextra -Werror -mcpu=v2 -mllvm -no-stack-coloring -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -no-global-types -output-stem sock Sock sock.c -- -O2 -Wall -Wextra -Werror -mcpu=v2 -mllvm -no-stack-coloring -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -no-global-types -output-stem to_backend ToBackend to_backend.c -- -O2 -Wall -Wextra -Werror -mcpu=v2 -mllvm -no-stack-coloring -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -no-global-types -output-stem to_client ToClient to_client.c -- -O2 -Wall -Wextra -Werror -mcpu=v2 -mllvm -no-stack-coloring -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -no-global-types -output-stem from_pod FromPod from_pod.c -- -O2 -Wall -Wextra -Werror -mcpu=v2 -mllvm -no-stack-coloring -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -no-global-types -output-stem to_pod ToPod to_pod.c -- -O2 -Wall -Wextra -Werror -mcpu=v2 -mllvm -no-stack-coloring -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -no-global-types -output-dir measure -go-package measure -output-stem lookup Lookup measure/lookup.c -- -O2 -Wall -Wextra -Wno-unused-parameter -Werror -mcpu=v2 -mllvm -no-stack-coloring -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu
