// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import "net/netip"

// AddrKey is a key for whoever is at addr, an IP address and a port as net.Addr and
// http.Request have them: the IPv4 address, or of an IPv6 address the /64 that one
// client usually has to itself, in which it could else be somebody new with each
// request. It is empty if addr is none, and an empty key is denied by sets and
// stores.
func AddrKey(addr string) string {
	at, err := netip.ParseAddrPort(addr)
	if err != nil {
		return ""
	}
	ip := at.Addr().Unmap().WithZone("")
	if ip.Is4() {
		return ip.String()
	}
	p, err := ip.Prefix(64)
	if err != nil {
		return ""
	}
	return p.String()
}
