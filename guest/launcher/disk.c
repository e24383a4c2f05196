/* The disk of one sandbox: a sparse image, cloned, attached and mounted. */
#include "launch.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/loop.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#ifndef LOOP_CONFIGURE /* older headers; the kernel has it since 5.8 */
struct loop_config {
    __u32 fd;
    __u32 block_size;
    struct loop_info64 info;
    __u64 reserved[8];
};
#define LOOP_CONFIGURE 0x4C0A
#endif

#define DEVICE_HINT "trusted.sandyard.loop" /* on a layer: the number of the device it was last attached to */

static void copy_range(int in, int out, off_t at, off_t end)
{
    static char buffer[1 << 16];
    while (at < end) {
        size_t want = end - at < (off_t)sizeof buffer ? (size_t)(end - at) : sizeof buffer;
        ssize_t got = pread(in, buffer, want, at);
        if (got <= 0)
            fail("disk", "read the template image");
        if (pwrite(out, buffer, (size_t)got, at) != got)
            fail("disk", "write the image");
        at += got;
    }
}

/* A copy-on-write clone where the file system has them, else a copy of what is not a hole. */
void clone_image(const char *from, const char *to)
{
    struct stat st;
    int in = open(from, O_RDONLY | O_CLOEXEC);
    if (in < 0 || fstat(in, &st) != 0)
        fail("disk", from);
    int out = open(to, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (out < 0)
        fail("disk", to);
    if (ioctl(out, FICLONE, in) != 0) {
        if (ftruncate(out, st.st_size) != 0)
            fail("disk", to);
        for (off_t data = lseek(in, 0, SEEK_DATA); data >= 0;) {
            off_t hole = lseek(in, data, SEEK_HOLE);
            if (hole < 0)
                fail("disk", from);
            copy_range(in, out, data, hole);
            data = lseek(in, hole, SEEK_DATA);
        }
        if (errno != ENXIO) /* what SEEK_DATA says after the last of it */
            fail("disk", from);
    }
    close(in);
    close(out);
}

static int open_device(int number, int mode)
{
    char path[32];
    snprintf(path, sizeof path, "/dev/loop%d", number);
    int fd = open(path, mode | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT && (mknod(path, S_IFBLK | 0600, makedev(7, number)) == 0 || errno == EEXIST))
        fd = open(path, mode | O_CLOEXEC); /* no device manager made the node */
    return fd;
}

/* Attach to a free device that goes when its last user does; its number. Others race for the same: try on.
 *
 * No direct I/O: mounting would have to wait for the fresh image to reach the host's disk, where
 * now a short life never touches it (its dirty pages go with the unlinked file). */
static int attach(int backing, unsigned flags, int *number_out)
{
    struct loop_config config;
    int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    if (control < 0)
        fail("disk", "/dev/loop-control");
    memset(&config, 0, sizeof config);
    config.fd = (__u32)backing;
    config.info.lo_flags = LO_FLAGS_AUTOCLEAR | flags;
    for (int tries = 0; tries < 256; tries++) {
        int number = ioctl(control, LOOP_CTL_GET_FREE);
        if (number < 0)
            fail("disk", "LOOP_CTL_GET_FREE");
        int device = open_device(number, flags & LO_FLAGS_READ_ONLY ? O_RDONLY : O_RDWR);
        if (device < 0)
            continue;
        if (ioctl(device, LOOP_CONFIGURE, &config) == 0) {
            *number_out = number;
            close(control);
            return device;
        }
        if (errno != EBUSY)
            fail("disk", "LOOP_CONFIGURE");
        close(device);
    }
    errno = EBUSY;
    fail("disk", "no free loop device");
}

static void mount_device(int number, const char *where, unsigned long flags, const char *options)
{
    char path[32];
    snprintf(path, sizeof path, "/dev/loop%d", number);
    if (mount(path, where, "ext4", MS_NODEV | MS_NOATIME | flags, options) != 0)
        fail("disk", "mount");
}

void mount_image(const char *image, const char *where)
{
    int number, backing = open(image, O_RDWR | O_CLOEXEC);
    if (backing < 0)
        fail("disk", image);
    int device = attach(backing, 0, &number);
    mount_device(number, where, 0, "noinit_itable,barrier=0,errors=continue");
    close(device);
    close(backing);
}

/* The device that already shows `layer`, held open so that it stays; -1 where there is none. */
static int attached(int layer, int *number_out)
{
    struct loop_info64 info;
    struct stat st;
    int number;
    if (fgetxattr(layer, DEVICE_HINT, &number, sizeof number) != sizeof number || fstat(layer, &st) != 0)
        return -1;
    int device = open_device(number, O_RDONLY);
    if (device >= 0 && ioctl(device, LOOP_GET_STATUS64, &info) == 0 && info.lo_inode == st.st_ino &&
        info.lo_device == st.st_dev && info.lo_flags & LO_FLAGS_READ_ONLY) {
        *number_out = number;
        return device;
    }
    if (device >= 0)
        close(device);
    return -1;
}

/* All sandboxes of a layer mount one device, so that the kernel keeps its pages once. The image is a
 * copy of one that only kernels have written: no sandbox can shape the file system's structures. */
void mount_layer(const char *layer, const char *where)
{
    int number, fd = open(layer, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || flock(fd, LOCK_EX) != 0)
        fail("rootfs", layer);
    int device = attached(fd, &number);
    if (device < 0) {
        device = attach(fd, LO_FLAGS_READ_ONLY, &number);
        fsetxattr(fd, DEVICE_HINT, &number, sizeof number, 0); /* without it the next attaches its own */
    }
    mount_device(number, where, MS_RDONLY, "noload");
    flock(fd, LOCK_UN); /* by name: the device keeps the descriptor's other end, and with it the lock */
    close(device);
    close(fd);
}

/* On a disk no sandbox has had yet; an existing name, symlinks included, is refused. */
void write_new(const char *path, const char *owner, const char *text)
{
    uid_t uid = (uid_t)strtoul(owner, NULL, 10);
    size_t size = strlen(text);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (fd < 0 || write(fd, text, size) != (ssize_t)size || fchmod(fd, 0644) != 0 || fchown(fd, uid, uid) != 0)
        fail("disk", path);
    close(fd);
}

