// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package access

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/IBM/sarama"
)

func TestValidate(t *testing.T) {
	for _, c := range []struct {
		config Config
		kafka  bool
		want   string // part of the error; empty: none
	}{
		{Config{}, true, ""},
		{Config{TLS: true, CA: "ca", Cert: "c", Key: "k", User: "u", PasswordFile: "p", SASL: Plain}, true, ""},
		{Config{User: "u", PasswordFile: "p"}, false, ""},
		{Config{Cert: "c"}, true, "--cert and --key"},
		{Config{User: "u", SASL: Plain}, true, "--user and --password-file"},
		{Config{User: "u", PasswordFile: "p"}, true, "--sasl: must be given with --user"},
		{Config{SASL: Plain}, true, `--sasl "plain": needs --user`},
		{Config{SASL: Plain}, false, `--sasl "plain": is for Kafka`},
	} {
		err := c.config.Validate(c.kafka)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: %v, want %q", c.config, err, c.want)
		}
	}
}

func TestOpen(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	empty, password := write("empty", ""), write("password", "s3 cret\r\n")
	_, err := Config{CA: empty, Cert: empty, Key: empty, User: "u", PasswordFile: filepath.Join(dir, "none")}.Open()
	for _, flag := range []string{"--ca", "--cert", "--password-file"} {
		if err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("%v does not name %s", err, flag)
		}
	}
	a, err := Config{User: "bob", PasswordFile: password, SASL: ScramSHA512}.Open()
	if err != nil {
		t.Fatal(err)
	}
	c := sarama.NewConfig()
	a.Kafka(c)
	if s := c.Net.SASL; !s.Enable || s.User != "bob" || s.Password != "s3 cret" || s.Mechanism != sarama.SASLTypeSCRAMSHA512 || c.Net.TLS.Enable {
		t.Errorf("%+v", s)
	}
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
	if got, err := a.URL("https://eve:x@host:1/v"); got != "https://bob:s3%20cret@host:1/v" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := a.URL("http://bob:%zs3cret@host"); err == nil || strings.Contains(err.Error(), "s3cret") {
		t.Error(err)
	}
}

func TestAddresses(t *testing.T) {
	for _, c := range []struct {
		is   func(string) bool
		yes  string // with spaces between
		none string
	}{
		{KafkaAddress, "h:1 h:1,[::1]:65535", "h :1 h:0 h:1, nats://h:1 bob:x@h:1"},
		{NATSAddress, "h h:1 nats://h,tls://bob:x@h:1", "amqp://h nats://h, http://h"},
		{HTTPAddress, "http://h https://bob:x@h:1", "h:1 amqp://h http:// http://bob:%zx@h"},
	} {
		for a := range strings.FieldsSeq(c.yes) {
			if !c.is(a) {
				t.Errorf("%q is refused", a)
			}
		}
		for _, a := range append(strings.Fields(c.none), "") {
			if c.is(a) {
				t.Errorf("%q is taken", a)
			}
		}
	}
}

// The conversation of RFC 7677, section 3.
func TestScram(t *testing.T) {
	const (
		challenge = "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
		final     = "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
	)
	begin := func() *scram {
		s := &scram{mechanism: ScramSHA256, nonce: "rOprNGfwEbeRWgbNEkqO"}
		if err := s.Begin("user", "pencil", ""); err != nil {
			t.Fatal(err)
		}
		if got, err := s.Step(""); got != "n,,n=user,r=rOprNGfwEbeRWgbNEkqO" || err != nil {
			t.Fatalf("%q, %v", got, err)
		}
		return s
	}
	s := begin()
	const want = "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
	if got, err := s.Step(challenge); got != want || err != nil || s.Done() {
		t.Fatalf("%q, %v", got, err)
	}
	if _, err := s.Step(final); err != nil || !s.Done() {
		t.Error(err)
	}
	if _, err := s.Step(final); err == nil {
		t.Error("a fourth step")
	}

	// What an impostor may say.
	for _, bad := range []string{
		"", "r=other,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
		"r=rOprNGfwEbeRWgbNEkqO,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096", // nothing of its own
		strings.Replace(challenge, "i=4096", "i=1", 1), strings.Replace(challenge, "i=4096", "i=999999999", 1),
		strings.Replace(challenge, "s=W22", "s=!", 1), "m=ext," + challenge,
	} {
		if got, err := begin().Step(bad); err == nil || got != "" {
			t.Errorf("%q: %q", bad, got)
		}
	}
	for _, bad := range []string{"", "e=invalid-proof", "v=", strings.Replace(final, "6rri", "7rri", 1)} {
		s := begin()
		if _, err := s.Step(challenge); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Step(bad); err == nil {
			t.Errorf("%q passes", bad)
		}
	}
	s = &scram{nonce: "x"}
	if err := s.Begin("a=b,c", "p", "d,e"); err != nil {
		t.Fatal(err)
	}
	if got, _ := s.Step(""); got != "n,a=d=2Ce,n=a=3Db=2Cc,r=x" {
		t.Error(got)
	}
}

func TestRedact(t *testing.T) {
	for text, want := range map[string]string{
		"nats://host:4222":                        "nats://host:4222",
		"bob:s3cret@host":                         "...@host",
		"nats://bob:s3cret@host:4222":             "nats://...@host:4222",
		"amqp://bob:s3/cr,et@host:5672/vhost":     "amqp://...@host:5672/vhost",
		"nats://bob:s3cret@one,nats://al:x@two":   "nats://...@two",
		`dial "amqp://bob:s3cret@host": refused`:  `dial "amqp://...@host": refused`,
		"connect to nats://bob:s@cret@host: away": "connect to nats://...@host: away",
	} {
		if got := Redact(text); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}
