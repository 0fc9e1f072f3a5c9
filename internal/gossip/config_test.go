// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

func TestConfigValidate(t *testing.T) {
	self := crdt.Replica{Name: "a", Incarnation: 1}
	if err := (Config{Self: self}).Validate(); err != nil {
		t.Errorf("a Config with nothing but Self: %v", err)
	}
	long := strings.Repeat("x", 65)
	err := Config{
		Cluster:   strings.Repeat("x", 256),
		Zone:      long,
		Region:    long,
		Floor:     time.Microsecond,
		KeepAlive: time.Hour,
		MaxPacket: 1401,
		MaxPeers:  -1,
		Burst:     5000,
	}.Validate()
	if !errors.Is(err, ErrConfig) {
		t.Fatalf("%v is not ErrConfig", err)
	}
	for _, want := range []string{
		"Cluster: ", "in [0, 255] bytes", `Self.Name: "" is not in [1, 64] bytes`, "Self.Incarnation: 0",
		"Zone: ", "Region: ", "Floor: 1µs is not in [100µs, 1s]", "KeepAlive: 1h0m0s is not in [100µs, 1m0s]",
		"MaxPacket: 1401 is not in [512, 1400]", "MaxPeers: -1 is not in [1, 4096]", "Burst: 5000 is not in [1, 4096]",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing in:\n%v", want, err)
		}
	}
	if got := strings.Count(err.Error(), "\n") + 1; got != 10 {
		t.Errorf("%d problems, want 10:\n%v", got, err)
	}

	edges := Config{Self: self, Floor: time.Second, KeepAlive: time.Second, MaxPacket: 512, MaxPeers: 1, Burst: 1}
	if err := edges.Validate(); err != nil {
		t.Errorf("at the edges: %v", err)
	}
	edges.KeepAlive = time.Second - 1
	if err := edges.Validate(); err == nil {
		t.Error("KeepAlive below Floor is valid")
	}
}

func TestNewRefusesSections(t *testing.T) {
	cfg := Config{Self: crdt.Replica{Name: "a", Incarnation: 1}}
	_, err := New(cfg, WithSection("", &ledger{}), WithSection("x", nil), WithSection("y", &ledger{}), WithSection("y", &ledger{}))
	if !errors.Is(err, ErrConfig) {
		t.Fatalf("%v is not ErrConfig", err)
	}
	for _, want := range []string{`"" is not in`, `"x" is nil`, `"y" and "y" have one id`} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing in:\n%v", want, err)
		}
	}
	var many []Option
	for i := range 17 {
		many = append(many, WithSection(string(rune('a'+i)), &ledger{}))
	}
	if _, err := New(cfg, many...); !errors.Is(err, ErrConfig) {
		t.Errorf("17 sections: %v", err)
	}
	if _, err := New(cfg, many[:16]...); err != nil {
		t.Errorf("16 sections: %v", err)
	}
	if _, err := New(Config{}); !errors.Is(err, ErrConfig) {
		t.Errorf("no Self: %v", err)
	}
}
