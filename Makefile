# SPDX-License-Identifier: Apache-2.0
#
# make demo   the two-cluster lab, from nothing to its end
# make test   every test, the privileged ones on the real kernel included (as root)
# make help   all targets

SHELL   := /bin/bash -o pipefail
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
BIN     := bin

# What the project needs of Debian 12 beyond Go, git, make and apt. The compiler is pinned because its output is
# committed; where the archive has moved on from another version, the one it has is taken and said so.
LAB_DEBS := \
	bpftool=7.1.0+6.1.192-2 \
	iproute2=6.1.0-3

# What tests and checks need beyond the lab.
DEBS := $(LAB_DEBS) \
	chromium=156.0.8078.79-1~deb12u1 \
	chromium-driver=156.0.8078.79-1~deb12u1 \
	clang-19=1:19.1.7-3~deb12u1 \
	curl=7.88.1-10+deb12u15 \
	etcd-server=3.4.23-4+b4 \
	gcc=4:12.2.0-3 \
	iputils-ping=3:20221126-1+deb12u1 \
	libbpf-dev=1:1.1.2-0+deb12u1 \
	libc6-dev=2.36-9+deb12u14 \
	linux-libc-dev=6.1.192-2 \
	llvm-19=1:19.1.7-3~deb12u1 \
	prometheus=2.42.0+ds-5+deb12u1 \
	tcpdump=4.99.3-1 \
	tshark=4.0.17-0+deb12u3

# Packages that only `make test-kernels` and `make test-packages` need.
VM_DEBS := \
	e2fsprogs=1.47.0-2+b2 \
	kmod=30+20221128-1 \
	mmdebstrap=1.3.5-7 \
	qemu-system-x86=1:7.2+dfsg-7+deb12u18+b3

export CGO_ENABLED ?= 0

KUBE_APISERVER := .cache/kube-apiserver

.PHONY: help deps lab-deps build deps-kube kube-apiserver demo test test-faults test-long check docs generate bench fuzz lab lab-kubernetes test-kernels vagrant-test mechanisms packages sbom vulncheck test-packages test-reproducible clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

deps: ## install what is missing of the Debian packages, and fetch the Go modules and tools
	@.ci/deps $(DEBS)
	@go mod download

lab-deps:
	@.ci/deps $(LAB_DEBS)

build: ## build bin/weft and bin/weft-lab (needs Go only)
	@mkdir -p $(BIN)
	go build -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o $(BIN)/ ./cmd/weft ./cmd/weft-lab

demo: lab-deps build ## run the two-cluster lab to its end and tell what happens
	$(BIN)/weft-lab demo

lab: lab-deps build ## build the two-cluster lab and leave it up to play with
	$(BIN)/weft-lab up

lab-kubernetes: lab-deps build kube-apiserver ## build the lab with an API server of Kubernetes in each cluster
	$(BIN)/weft-lab up --kubernetes

test: deps kube-apiserver ## run every test with the race detector
	CGO_ENABLED=1 go test -race -count=1 -timeout 15m ./...
	cd test/chart && go test -count=1 ./...

deps-kube: kube-apiserver ## the same as kube-apiserver

kube-apiserver: $(KUBE_APISERVER) ## build the API server of Kubernetes that tests run (some minutes, once)

$(KUBE_APISERVER): $(wildcard test/kubeapiserver/*)
	@mkdir -p $(@D)
	cd test/kubeapiserver && CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o $(CURDIR)/$@ .
	@touch $@

test-faults: deps ## run kvstore's fault tests to their full figures (at most 15 minutes)
	WEFT_TEST_FAULTS=1 CGO_ENABLED=1 go test -race -count=1 -run '^(TestFault|TestWatcherOracle)' -timeout 15m ./kvstore

test-long: deps kube-apiserver ## run the other packages' long tests to their full figures (an hour on two cores)
	WEFT_TEST_FAULTS=1 CGO_ENABLED=1 go test -race -count=1 -run '^TestFault' -timeout 60m ./mesh
	WEFT_TEST_FAULTS=1 go test -count=1 -timeout 60m -run '^TestModel$$' ./ipcache
	WEFT_TEST_FAULTS=1 go test -count=1 -timeout 60m -run '^(TestOneTermWrites|TestKubernetesFaults)$$' ./operator
	WEFT_TEST_FAULTS=1 go test -count=1 -timeout 60m ./datapath ./endpoint ./test

check: deps ## gofmt, vet, staticcheck, tidy, generated files unchanged, architecture
	@out=$$(gofmt -l $$(git ls-files -co --exclude-standard '*.go')); [ -z "$$out" ] || { echo "gofmt would change: $$out"; exit 1; }
	go vet ./...
	go tool staticcheck ./...
	go mod tidy -diff
	cd test/kubeapiserver && go mod tidy -diff
	cd test/chart && go vet ./... && go mod tidy -diff
	@before=$$(sha256sum bpf/*_bpfel.* bpf/measure/*_bpfel.*); $(MAKE) -s generate; \
		[ "$$before" = "$$(sha256sum bpf/*_bpfel.* bpf/measure/*_bpfel.*)" ] || { echo "bpf: generated files are not what the C makes: run 'make generate' and commit"; exit 1; }
	go test -count=1 .
	go test -count=1 -v -run '^TestVerifierBudget$$' ./datapath | grep 'verifier budget'
	@$(MAKE) -s mechanisms >/dev/null

docs: ## write the command reference and the manual pages from the commands
	go test ./cmd/weft -count=1 -run '^TestReference$$' -update

generate: ## compile the BPF C (needs clang-19) and write its Go mirrors
	go generate ./bpf

bench: deps kube-apiserver ## measure, as ratios against baselines of the same run, into docs/performance.md (BENCH=regexp, COUNT=n)
	WEFT_BENCH_TABLE=$(CURDIR)/docs/performance.md go test -run '^$$' -bench '$(or $(BENCH),.)' -benchtime 1x -count $(or $(COUNT),3) -timeout 30m ./test/bench

fuzz: ## fuzz every target for FUZZTIME (30s)
	@for pkg in $$(go list ./...); do \
		for f in $$(go test -list '^Fuzz' $$pkg 2>/dev/null | grep '^Fuzz'); do \
			echo "== $$pkg $$f"; go test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(or $(FUZZTIME),30s) $$pkg || exit 1; \
		done; done

test-kernels: deps ## run the kernel tests under Debian's own kernels in QEMU (KERNELS="6.1 6.12")
	@.ci/deps $(VM_DEBS)
	go run ./test/kernels $(KERNELS)

vagrant-test: ## bring up the lab of four virtual machines, and do what vagrant/README.md tells (needs Vagrant with libvirt)
	@[ -e vagrant/box/weft-lab.box ] || vagrant/box/build.sh
	vagrant box list | grep -q "^weft-lab " || vagrant box add --name weft-lab vagrant/box/weft-lab.box
	vagrant/test

mechanisms: ## print the mechanisms that no test names yet
	@named=$$(git grep -hoE '// mechanism:.*' -- '*_test.go' | cut -d: -f2 | tr -s ' ,' '\n' | sort -u); \
		grep -v '^#' test/mechanisms.txt | while read -r id what; do \
			grep -qx "$$id" <<<"$$named" || echo "$$id $$what"; done; \
		unknown=$$(comm -23 <(grep . <<<"$$named") <(grep -v '^#' test/mechanisms.txt | cut -d' ' -f1 | sort -u)); \
		[ -z "$$unknown" ] || { echo "unknown ids: $$unknown" >&2; exit 1; }

packages: ## build the .deb and .rpm (needs Go only); GOARCH=arm64 for another machine
	@deploy/packages/build $(BIN)/packages
	@! command -v systemd-analyze >/dev/null || for unit in deploy/systemd/*.service; do \
		systemd-analyze security --offline=true $$unit | tail -1; done

sbom: build ## list what each binary is made of (CycloneDX) in bin/*.cdx.json
	@for binary in weft weft-lab; do go run ./deploy/sbom $(BIN)/$$binary >$(BIN)/$$binary.cdx.json && echo $(BIN)/$$binary.cdx.json; done

vulncheck: ## look for known weaknesses in what is linked (VULNDB=file:///DIRECTORY: a copy of its database)
	go run golang.org/x/vuln/cmd/govulncheck@v1.8.0 $(if $(VULNDB),-db $(VULNDB)) ./...

test-packages: ## install, crash, upgrade and remove .deb and .rpm in a Debian with systemd in QEMU (FROM=commit; about six minutes)
	@.ci/deps $(VM_DEBS)
	go run ./test/packages $(FROM)

test-reproducible: ## build the packages in two folders and compare
	@deploy/packages/reproducible

clean: ## take the lab down and remove what was built
	@[ ! -x $(BIN)/weft-lab ] || $(BIN)/weft-lab down
	rm -rf $(BIN) .cache
