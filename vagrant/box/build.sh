#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes weft-lab.box beside this script: Debian 12 for Vagrant's libvirt provider, with all that the lab installs, so that
# `vagrant up` downloads nothing. Needs root and Debian's packages mmdebstrap, e2fsprogs, fdisk, grub-pc-bin and qemu-utils; no loop
# device, no KVM, no libvirt. Some two minutes.
#
#   vagrant/box/build.sh && vagrant box add --force --name weft-lab vagrant/box/weft-lab.box
set -euo pipefail
cd "$(dirname "$0")"

readonly suite=bookworm size_mib=3072
# What the lab needs beyond a Debian that boots: etcd, something that serves and asks for pages, ssh and sudo for Vagrant.
readonly packages=systemd,systemd-sysv,systemd-resolved,udev,dbus,linux-image-cloud-amd64,initramfs-tools,openssh-server,sudo,iproute2,ca-certificates,procps,rsync,less,etcd-server,busybox,curl
# The keys that Vagrant itself publishes, of its version 2.4 and of those before; the first start replaces them.
readonly insecure_keys="ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIN1YdxBpNlzxDqfJyw/QKow1F+wvG9hXGoqiysfJOn5Y vagrant insecure public key
ssh-rsa AAAAB3NzaC1yc2EAAAABIwAAAQEA6NF8iallvQVp22WDkTkyrtvp9eWW6A8YVr+kz4TjGYe7gHzIw+niNltGEFHzD8+v1I2YJ6oXevct1YeS0o9HZyN1Q9qgCgzUFtdOKLv6IedplqoPkcmF0aYet2PkEDo3MlTBckFXPITAMzF8dJSIFo9D8HfdOV0IAdx4O7PtixWKn5y2hMNG0zQPyUecp4pzC6kivAIhyfHilFR61RGL+GPXQ2MWZWFYbAGjyiYJnAmCP3NOTd0jMZEnDkbUvxhMmBYSdETk1rRgm+R4LOzFUGaHqHDLKLX+FIPKcF96hrucXzcWyLbIbEgE98OHlnVYCzRdK8jlqm8tehUc9c9WhQ== vagrant insecure public key"

die() { echo "build.sh: $*" >&2; exit 1; }
[ "$(id -u)" -eq 0 ] || die "be root: the files of the machine belong to root"
for tool in mmdebstrap mkfs.ext4 sfdisk qemu-img grub-mkimage; do
	command -v "$tool" >/dev/null || die "no $tool: apt-get install mmdebstrap e2fsprogs fdisk qemu-utils grub-common grub-pc-bin"
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "Debian $suite"
mmdebstrap --quiet --variant=apt --include="$packages" --aptopt='APT::Install-Recommends "false"' \
	--dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/doc/*' "$suite" "$work/tree"

tree=$work/tree
echo "vagrant" >"$tree/etc/hostname"
echo "/dev/vda1 / ext4 defaults,noatime 0 1" >"$tree/etc/fstab"
chroot "$tree" useradd --create-home --shell /bin/bash vagrant
echo 'vagrant ALL=(ALL) NOPASSWD: ALL' >"$tree/etc/sudoers.d/vagrant"
chmod 0440 "$tree/etc/sudoers.d/vagrant"
install -d -m 0700 "$tree/home/vagrant/.ssh"
echo "$insecure_keys" >"$tree/home/vagrant/.ssh/authorized_keys"
chmod 0600 "$tree/home/vagrant/.ssh/authorized_keys"
chroot "$tree" chown -R vagrant: /home/vagrant/.ssh
echo 'UseDNS no' >"$tree/etc/ssh/sshd_config.d/vagrant.conf"
# The first device is Vagrant's, by DHCP; Vagrant configures the others as it makes them.
install -d "$tree/etc/systemd/network"
printf '[Match]\nName=eth0\n[Network]\nDHCP=ipv4\n[DHCPv4]\nClientIdentifier=mac\n' >"$tree/etc/systemd/network/80-vagrant.network"
# Every machine gets keys and an id of its own. etcd waits until it is configured.
rm -f "$tree"/etc/ssh/ssh_host_* "$tree/etc/machine-id"
touch "$tree/etc/machine-id"
printf '[Service]\nExecStartPre=/usr/bin/ssh-keygen -A\n' | install -D -m 0644 /dev/stdin "$tree/etc/systemd/system/ssh.service.d/keys.conf"
sed -i 's,^ExecStartPre=/usr/sbin/sshd -t$,,' "$tree/lib/systemd/system/ssh.service"
chroot "$tree" systemctl --quiet enable systemd-networkd ssh
chroot "$tree" systemctl --quiet disable etcd
chroot "$tree" systemctl --quiet mask apt-daily.timer apt-daily-upgrade.timer

echo "disk"
install -d "$tree/boot/grub"
cat >"$tree/boot/grub/grub.cfg" <<'GRUB'
set timeout=0
menuentry Debian {
  linux /vmlinuz root=/dev/vda1 ro quiet net.ifnames=0 console=ttyS0 console=tty0
  initrd /initrd.img
}
GRUB
truncate -s "${size_mib}M" "$work/disk"
mkfs.ext4 -q -d "$tree" "$work/root" "$((size_mib - 2))M"
# One partition from the first MiB on; before it, GRUB as its two files lie on any disk: boot.img in the first sector with the
# partition table, core.img from the second on.
printf 'label: dos\nstart=2048, type=83, bootable\n' | sfdisk --quiet "$work/disk"
dd if="$work/root" of="$work/disk" bs=1M seek=1 conv=notrunc,sparse status=none
grub-mkimage -O i386-pc -o "$work/core.img" -p '(hd0,msdos1)/boot/grub' biosdisk part_msdos ext2 normal linux
dd if=/usr/lib/grub/i386-pc/boot.img of="$work/disk" bs=440 count=1 conv=notrunc status=none
dd if="$work/core.img" of="$work/disk" bs=512 seek=1 conv=notrunc status=none

echo "box"
qemu-img convert -c -O qcow2 "$work/disk" "$work/box.img"
printf '{"provider": "libvirt", "format": "qcow2", "virtual_size": %d}\n' $(((size_mib + 1023) / 1024)) >"$work/metadata.json"
printf 'Vagrant.configure("2") { |config| }\n' >"$work/Vagrantfile"
tar -C "$work" -cf weft-lab.box.new metadata.json Vagrantfile box.img
mv weft-lab.box.new weft-lab.box
echo "$PWD/weft-lab.box: $(du -h weft-lab.box | cut -f1)"
