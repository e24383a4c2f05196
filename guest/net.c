#include "net.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <net/route.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define UPLINK "eth0"

static struct sockaddr make_address(uint32_t order)
{
	struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr.s_addr = order};
	struct sockaddr address;

	memcpy(&address, &in, sizeof address);
	return address;
}

static int set_up(int fd, const char *name)
{
	struct ifreq request = {.ifr_flags = IFF_UP};

	snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
	return ioctl(fd, SIOCSIFFLAGS, &request);
}

static int set_address(int fd, unsigned long what, uint32_t order)
{
	struct ifreq request = {.ifr_name = UPLINK};

	request.ifr_addr = make_address(order);
	return ioctl(fd, what, &request);
}

static int add_route(int fd, uint32_t gateway)
{
	struct rtentry route = {.rt_flags = RTF_UP | RTF_GATEWAY};

	route.rt_dst = make_address(INADDR_ANY);
	route.rt_genmask = make_address(INADDR_ANY);
	route.rt_gateway = make_address(gateway);
	return ioctl(fd, SIOCADDRT, &route) < 0 && errno != EEXIST ? -1 : 0;
}

/* An address of it would lead nowhere, and be tried first. */
static void turn_off_ipv6(void)
{
	int fd = open("/proc/sys/net/ipv6/conf/" UPLINK "/disable_ipv6", O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		return; /* a kernel that has none */
	if (write(fd, "1", 1) < 0)
		dprintf(2, "sandyard: ipv6 of " UPLINK " stays on: %s\n", strerror(errno));
	close(fd);
}

static int done(int fd, int rc)
{
	int err = errno;

	close(fd);
	errno = err;
	return rc;
}

int net_loopback(void)
{
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	return fd < 0 ? -1 : done(fd, set_up(fd, "lo"));
}

int net_uplink(const char *text)
{
	char address[16], gateway[16];
	struct in_addr own, beyond;
	int prefix, fd;

	if (sscanf(text, "%15[0-9.]/%d %15[0-9.]", address, &prefix, gateway) != 3 || prefix < 1 || prefix > 32 ||
	    inet_pton(AF_INET, address, &own) != 1 || inet_pton(AF_INET, gateway, &beyond) != 1) {
		errno = EINVAL;
		return -1;
	}
	fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -1;
	turn_off_ipv6();
	if (set_address(fd, SIOCSIFADDR, own.s_addr) < 0 ||
	    set_address(fd, SIOCSIFNETMASK, htonl(~0U << (32 - prefix))) < 0 || set_up(fd, UPLINK) < 0 ||
	    add_route(fd, beyond.s_addr) < 0)
		return done(fd, -1);
	return done(fd, 0);
}
