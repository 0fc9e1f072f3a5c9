// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package gossip

func newAlarm() alarm { return newRuntimeAlarm() }
